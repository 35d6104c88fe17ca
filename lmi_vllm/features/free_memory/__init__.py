"""Memory that has to be free before a model is loaded: LMI's required_memory_mb and its like."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.free_memory.check import FreeMemorySettings, warn_of_memory
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(FreeMemorySettings)
    c.rules[RulePhase.PLACED].append(warn_of_memory)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.free_memory.check import check_memory

    s.start.checks.append(check_memory)
