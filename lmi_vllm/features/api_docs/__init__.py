"""The OpenAPI description of the running server, and a page that shows it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.features.api_docs.openapi import GROUP

    s.routes(GROUP)
