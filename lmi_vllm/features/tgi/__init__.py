"""The routes of Text Generation Inference's clients, with `tgi_compat`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.tgi.routes import GROUP

    s.routes.groups.append(GROUP)
