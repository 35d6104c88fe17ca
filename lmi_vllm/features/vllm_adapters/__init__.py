"""vLLM's own two routes that load and unload adapters."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.features.vllm_adapters.routes import GROUP

    s.routes(GROUP)
