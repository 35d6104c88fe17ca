"""Modules that an adapter changes and that vLLM silently ignores.

vLLM does not wrap a layer that none of its LoRA layers fits (`c_attn` of GPT-BigCode on the
Transformers backend, a vision tower). It warns once at the start, and still loads adapters with
weights for the layer. Here every worker reports which modules of a loaded adapter have no LoRA
layer. The adapter is refused if no worker has one: a pipeline stage wraps only its own layers. The
names are those of vLLM's own tables, after it has mapped and packed them.

If several workers fail at a call, the executor reads only the first failure. It takes the others
for answers to later calls. So workers return the reason instead of raising.

Two names of an adapter's weights may be one name in vLLM, which then uses the later weights. They
were not checked together. The worker has the model's tables of names, and of those to skip.

`worker_extension_cls`, vLLM's own way to add methods to workers, adds these on every platform and
node. An operator's own class there is joined with ours. This module imports no vLLM.

Upstream: https://github.com/vllm-project/vllm/issues/34186 (modules), pull/57846 (failures).
Releases: 0.31 and later.
Shows: an adapter that answers as the base model, or as half of itself, with 200; after one adapter
    that was refused, every later one fails.
May go: when test_plain_vllm_loads_an_adapter_whose_modules_it_ignores fails.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmi_vllm.checks.adapter_config import WEIGHTS, module_of
from lmi_vllm.checks.safetensors_header import read_tensors
from lmi_vllm.engine.base import lacks_memory
from lmi_vllm.engine.vllm.workarounds import joined_class, joined_name
from lmi_vllm.errors import AdapterRefusedError

logger = logging.getLogger(__name__)

EXTENSION: Final = "lmi_vllm.engine.vllm.workarounds.ignored_modules.AdapterInspection"
METHOD: Final = "lmi_ignored_modules"
ADD_METHOD: Final = "lmi_add_adapter"
PIN_METHOD: Final = "lmi_pin_adapter"
RESIDENT_METHOD: Final = "lmi_resident_adapters"
NO_REASON: Final = "vLLM gives no reason; it may change no module that is served"
_SHOWN: Final = 3  # modules named in a refusal
_POOLING_PREFIX: Final = "model."  # adapters of pooling models may lack it
_EXPERTS_SUFFIX: Final = ".base_layer"  # PEFT's name for the first half of fused experts


class Refusal(StrEnum):
    """Why a worker refused a call."""

    NONE = ""
    FULL = "full"  # no slot or memory is left
    EVICTED = "evicted"  # a step has taken the adapter out
    OTHER = "other"


# Texts of vLLM (lora/model_manager.py, lora/worker_manager.py), which raises ValueError and
# RuntimeError for these as for everything else.
_REASONS: Final = {
    "No free lora slots": Refusal.FULL,
    "greater than the number of GPU LoRA slots": Refusal.FULL,
    "is not registered": Refusal.EVICTED,
}


class AdapterInspection:
    """Methods added to vLLM's worker class: they read, pin, list and inspect adapters."""

    def lmi_add_adapter(self, name: str, engine_id: int, path: str) -> tuple[str, str]:
        """Read an adapter unless it is loaded; return why that failed: a `Refusal` and a text."""
        requests = importlib.import_module("vllm.lora.request")  # the server imports us without
        worker: Any = self

        def add() -> None:
            _check_names(worker.model_runner.lora_manager._adapter_manager.model, Path(path))
            worker.add_lora(requests.LoRARequest(name, engine_id, path))

        return _reason(add)

    def lmi_pin_adapter(self, engine_id: int) -> tuple[str, str]:
        """Keep an adapter in its slot; return why that failed, as above."""
        worker: Any = self
        return _reason(lambda: worker.pin_lora(engine_id))

    def lmi_resident_adapters(self) -> list[tuple[int, bool, bool]]:
        """Return the ids of the loaded adapters, whether each has a slot, and whether pinned."""
        worker: Any = self
        manager = worker.model_runner.lora_manager._adapter_manager
        slots, pinned = {*manager.lora_index_to_id}, manager._registered_adapters.pinned_items
        return [(one, one in slots, one in pinned) for one in manager.list_adapters()]

    def lmi_ignored_modules(self, engine_id: int) -> list[str] | None:
        """Return the adapter's modules without a LoRA layer here; None if it is not loaded."""
        worker: Any = self
        manager = worker.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(engine_id)
        if adapter is None:
            return None
        wrapped = set(manager.modules)
        if manager.is_pooling_model:
            # Of names without the prefix vLLM packs copies, and leaves these.
            packed = (manager.packed_modules[one] for one in wrapped & {*manager.packed_modules})
            wrapped |= {name.removeprefix(_POOLING_PREFIX) for name in chain(wrapped, *packed)}
        return [name for name in adapter.loras if name.removesuffix(_EXPERTS_SUFFIX) not in wrapped]


def _check_names(model: Any, folder: Path) -> None:
    """Check that no two weights are for one module of the model, and that one module is adapted.

    Raises:
        ValueError: two are, by the names that the model maps to one another.
        AdapterRefusedError: every module is one that the model passes over.
        OSError: the file cannot be read.
    """
    parse = importlib.import_module("vllm.lora.utils").parse_fine_tuned_lora_name
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renaming = None if mapper is None else mapper.get_rename_mapper()
    first: dict[tuple[str, str], str] = {}
    skipped = getattr(model, "lora_skip_prefixes", None) or ()
    passed_over = set()
    for name in read_tensors(folder / WEIGHTS):
        if "base_layer.weight" in name:  # of the base model: vLLM reads none
            continue
        if any(f".{prefix}" in f".{name}" for prefix in skipped):
            passed_over.add(module_of(name)[0])
            continue
        key = (parse(name, renaming)[0], module_of(name)[1])
        if (other := first.setdefault(key, name)) != name:
            raise ValueError(f"{name} and {other} are one weight of the model")
    if not first:
        refuse_ignored(sorted(passed_over))


def _reason(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        logger.debug("refused", exc_info=True)
        usual = Refusal.FULL if lacks_memory(str(error)) else Refusal.OTHER
        kinds = (kind for words, kind in _REASONS.items() if words in str(error))
        return next(kinds, usual).value, str(error) or NO_REASON
    return Refusal.NONE.value, ""


def inspect_adapters(config: Any) -> None:
    """Add `METHOD` to the workers of this configuration, beside an existing extension class."""
    if config.lora_config is not None:
        other = config.parallel_config.worker_extension_cls
        config.parallel_config.worker_extension_cls = joined_name(EXTENSION, other)


if not TYPE_CHECKING:  # else a type checker accepts every name

    def __getattr__(name: str) -> type:
        """Return our class joined with the one in the rest of `name`; workers call this."""
        return joined_class(AdapterInspection, name)


def ignored_by_all(answers: Sequence[Sequence[str] | None]) -> list[str] | None:
    """Return the modules that every worker ignores; None if one no longer has the adapter."""
    known = [set(answer) for answer in answers if answer is not None]
    return sorted(set.intersection(*known)) if len(known) == len(answers) else None


def refuse_ignored(modules: Sequence[str]) -> None:
    """Raise for the first ignored module; return if there is none.

    Raises:
        AdapterRefusedError: with the first of them.
    """
    if not modules:
        return
    more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
    raise AdapterRefusedError(
        f"vLLM cannot adapt {', '.join(modules[:_SHOWN])}{more} of this model, and would answer "
        "without them: train the adapter without these modules, or merge it into the model"
    )
