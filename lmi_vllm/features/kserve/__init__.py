"""KServe's Open Inference Protocol (v2) over HTTP."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.kserve.routes import GROUP

    s.routes.groups.append(GROUP)
