"""Watchdogs of a running engine: one that stalls, or whose numbers are not finite, is replaced."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.watchdogs.settings import WatchdogSettings, check_restart
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(WatchdogSettings)
    c.rules[RulePhase.PLACED].append(check_restart)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.watchdogs.watchdogs import watching

    s.model_parts.append(watching)
