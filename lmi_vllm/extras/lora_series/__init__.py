"""`vllm:lora_requests_info` as routers read it: one series, with the names that requests give."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.extras.lora_series.series import showing_adapters

    s.lifespan(showing_adapters)
