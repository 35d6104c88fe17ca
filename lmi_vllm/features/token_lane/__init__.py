"""The token lane: tokens of plain requests go straight to those who read them, past vLLM's queues.

Without it vLLM's own way is taken for all of them: the same answers, for more time of the CPU.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.engine.vllm.outputs import TokenLane
    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    s.engines.vllm.token_lane.fill(make_lane)


def make_lane(tokenizer: object) -> "TokenLane":
    """Return the lane of an engine with this tokenizer."""
    from lmi_vllm.features.token_lane.lane import PlainLane

    return PlainLane(tokenizer)
