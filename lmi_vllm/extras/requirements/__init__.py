"""A model's requirements.txt, installed before the engine starts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.extras.requirements.packages import Requirements

    s.start.packages(Requirements)
