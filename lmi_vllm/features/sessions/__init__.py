"""Sticky sessions: a client's directory, created, named by its requests and closed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.sessions.settings import SessionSettings, check_store
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(SessionSettings)
    c.rules[RulePhase.PLACED].append(check_store)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.sessions.start import keeping_sessions

    s.model_parts.append(keeping_sessions)
