"""Speculative decoding: LMI's names and vLLM's older ones, and the draft model that is fetched."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    additional_downloads=(Lazy("lmi_vllm.extras.speculation.rules:fetch_draft"),),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.speculation.rules import (
        SpeculationSettings,
        check_draft_degree,
    )
    from lmi_vllm.extras.speculation.rules import (
        configure as put_drafts,
    )
    from lmi_vllm.translate.draft import RulePhase

    c.settings(SpeculationSettings)
    c.rule(RulePhase.WRITTEN, put_drafts)
    c.rule(RulePhase.PLACED, check_draft_degree)
