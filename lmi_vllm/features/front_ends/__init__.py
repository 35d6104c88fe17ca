"""Several HTTP processes over one engine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.front_ends.settings import FrontEndSettings

    c.settings(FrontEndSettings)


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.features.front_ends.group import front_end_group

    s.processes(front_end_group)
