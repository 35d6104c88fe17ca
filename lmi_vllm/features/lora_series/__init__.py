"""Adapters at work and adapters that are loaded, as routers read them: by the names of requests."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.lora_series.series import showing_adapters

    s.lifespans.append(showing_adapters)
