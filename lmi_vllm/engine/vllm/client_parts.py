"""What features do in a client of vLLM's engine; this module imports no vLLM."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from lmi_vllm.engine.base import CheckGrammar
from lmi_vllm.engine.vllm.parts import ConvertPickle
from lmi_vllm.messages import MediaPolicy
from lmi_vllm.slot import Slot

if TYPE_CHECKING:
    from lmi_vllm.engine.vllm.outputs import TokenLane


class EngineParts:
    """What features do in a client of vLLM's engine.

    `media` has vLLM load media of messages within the policy. `grammar_trials` gets the client,
    and the seconds and the thread of trials. `token_lane` gets the tokenizer; the lane takes tokens
    of plain requests before vLLM's output processor. `pickled_weights` turns the pickle of an
    adapter into safetensors.
    """

    def __init__(self) -> None:
        self.media = Slot[Callable[[MediaPolicy], None]]("media of messages")
        self.grammar_trials = Slot[Callable[[object, float, ThreadPoolExecutor], CheckGrammar]](
            "trials of grammars"
        )
        self.token_lane: Slot[Callable[[object], TokenLane]] = Slot("token lane")
        self.pickled_weights = Slot[ConvertPickle]("pickled weights")
