"""What features do in the engine's processes, and with files of adapters; imports no vLLM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi_vllm.engine.base import EngineGrammars

# Turns the pickle of an adapter into safetensors, given both paths; returns why that cannot be.
ConvertPickle = Callable[[Path, Path], str]


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """What features do in the engine's own processes.

    `watch_grammars` gets the scheduler. `model_classes` are registered with vLLM: name in
    `architectures` -> `module:Class`.
    """

    watch_grammars: Callable[[object], EngineGrammars]
    model_classes: Mapping[str, str]
