"""What an engine that starts is doing: its steps, read from vLLM's log."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.start_steps.drawing import drawing_starts
    from lmi_vllm.features.start_steps.reading import reading_steps

    s.lifespans += [reading_steps, drawing_starts]
