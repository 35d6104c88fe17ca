"""vLLM's own two routes that load and unload adapters."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.vllm_adapters.routes import GROUP

    s.routes.groups.append(GROUP)
