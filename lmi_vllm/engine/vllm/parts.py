"""What features do in vLLM's client and in its engine's processes; this module imports no vLLM."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmi_vllm.engine.base import CheckGrammar, EngineGrammars
from lmi_vllm.messages import MediaPolicy

if TYPE_CHECKING:
    from lmi_vllm.engine.vllm.outputs import TokenLane

# Turns the pickle of an adapter into safetensors, given both paths; returns why that cannot be.
ConvertPickle = Callable[[Path, Path], str]


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


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """What features do in the engine's own processes.

    `watch_grammars` gets the scheduler. `model_classes` are registered with vLLM: name in
    `architectures` -> `module:Class`.
    """

    watch_grammars: Callable[[object], EngineGrammars]
    model_classes: Mapping[str, str]
