"""Sticky sessions: a client's directory, created, named by its requests and closed."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    lifespan=Lazy("lmi_vllm.extras.sessions.start:keeping_sessions"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.sessions.sessions import SessionSettings
    from lmi_vllm.extras.sessions.start import check_store
    from lmi_vllm.translate.draft import RulePhase

    c.settings(SessionSettings)
    c.rule(RulePhase.PLACED, check_store)
