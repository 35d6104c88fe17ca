"""Options of other backends, of older vLLM releases and of the Java server: what became of them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.retired_options.options import (
        DroppedArguments,
        ForeignOptions,
        UnusedNames,
    )
    from lmi_vllm.features.retired_options.rules import legacy_arguments, legacy_lengths
    from lmi_vllm.translate.draft import RulePhase

    c.settings += (ForeignOptions, DroppedArguments, UnusedNames)
    c.rules[RulePhase.WRITTEN] += (legacy_arguments, legacy_lengths)
