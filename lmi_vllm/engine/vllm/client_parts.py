"""What features do in a client of vLLM's engine; this module imports no vLLM."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmi_vllm.engine.base import CheckGrammar
from lmi_vllm.engine.vllm.parts import ConvertPickle
from lmi_vllm.messages import MediaPolicy

if TYPE_CHECKING:
    from lmi_vllm.engine.vllm.outputs import TokenLane


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What features do in a client of vLLM's engine.

    `guard_media` has vLLM load media of messages within the policy. `try_grammars` gets the client,
    and the seconds and the thread of trials. `make_lane` gets the tokenizer; the lane takes tokens
    of plain requests before vLLM's output processor.
    """

    guard_media: Callable[[MediaPolicy], None]
    try_grammars: Callable[[object, float, ThreadPoolExecutor], CheckGrammar]
    make_lane: "Callable[[object], TokenLane]"
    convert_pickle: ConvertPickle
