"""Watchdogs of a running engine: one that stalls, or whose numbers are not finite, is replaced."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    lifespan=Lazy("lmi_vllm.extras.watchdogs.watchdogs:watching"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.watchdogs.settings import WatchdogSettings, check_restart
    from lmi_vllm.translate.draft import RulePhase

    c.settings(WatchdogSettings)
    c.rule(RulePhase.PLACED, check_restart)
