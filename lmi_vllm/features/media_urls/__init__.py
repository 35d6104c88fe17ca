"""Media in messages: fetched from public addresses only, and decoded within bounds."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.messages import MediaPolicy
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    s.engines.vllm.media.fill(guard_media)


def guard_media(policy: "MediaPolicy") -> None:
    """Have vLLM load media of messages within the policy."""
    from lmi_vllm.features.media_urls import connector

    connector.guard_media(policy)
