"""The web console: a page, and the data that it shows."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.console.routes import console

    s.routes.of_listener.append(console)
