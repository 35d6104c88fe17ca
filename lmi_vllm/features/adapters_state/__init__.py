"""`option.adapters_state`: adapters outlive the process, in a file or an object of replicas."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.adapters_state.settings import AdaptersStateSettings, check_state
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(AdaptersStateSettings)
    c.rules[RulePhase.PLACED].append(check_state)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.adapters_state.start import keeping_adapters

    s.model_parts.append(keeping_adapters)
