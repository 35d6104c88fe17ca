"""The routes of Text Generation Inference's clients, with `tgi_compat`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.features.tgi.routes import GROUP

    s.routes(GROUP)
