"""The web console: a page, and the data that it shows."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.features.console.routes import console

    s.listener_routes(console)
