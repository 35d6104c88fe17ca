"""The token lane: tokens of plain requests go straight to those who read them, past vLLM's queues.

Without it vLLM's own way is taken for all of them: the same answers, for more time of the CPU.
"""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    token_lane=Lazy("lmi_vllm.extras.token_lane.lane:PlainLane"),
)
