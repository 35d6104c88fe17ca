"""`option.adapters_state`: adapters outlive the process, in a file or an object of replicas."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    lifespan=Lazy("lmi_vllm.extras.adapters_state.start:keeping_adapters"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.adapters_state.settings import AdaptersStateSettings, check_state
    from lmi_vllm.translate.draft import RulePhase

    c.settings(AdaptersStateSettings)
    c.rule(RulePhase.PLACED, check_state)
