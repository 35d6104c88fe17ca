"""The OpenAPI description of the running server, and a page that shows it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.api_docs.openapi import GROUP

    s.routes.groups.append(GROUP)
