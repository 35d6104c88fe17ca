"""Memory that has to be free before a model is loaded: LMI's required_memory_mb and its like."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    plan_checks=(Lazy("lmi_vllm.extras.free_memory.check:check_memory"),),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.free_memory.check import FreeMemorySettings

    c.settings(FreeMemorySettings)
