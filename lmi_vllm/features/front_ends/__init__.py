"""Several HTTP processes over one engine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.front_ends.settings import FrontEndSettings

    c.settings.append(FrontEndSettings)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.front_ends.group import front_end_group

    s.processes.fill(front_end_group)
