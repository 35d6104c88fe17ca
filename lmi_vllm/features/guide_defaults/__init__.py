"""Notes of `explain` on defaults that differ from LMI's guides."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.guide_defaults.defaults import note_on_default, rows_of_defaults
    from lmi_vllm.translate.explain import ExplainedDefaults

    c.defaults.fill(ExplainedDefaults(note_on_default, rows_of_defaults))
