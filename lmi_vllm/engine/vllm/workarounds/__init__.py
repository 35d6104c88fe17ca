"""Workarounds for defects of vLLM or torch: a module for each, and one list of all.

What only a CPU needs is in `engine/vllm/cpu/`. A row of `WORKAROUNDS` replaces a name. It is
applied only in its scope and for its releases, and can be undone. Modules without a row are used
where they act. The docstring of each module names the test that says when it may go: one of plain
vLLM, which fails once the defect is gone. This module imports no vLLM: a row names its target,
which is imported when the row is applied. The functions below the list join our classes with an
operator's.
"""

import contextlib
import functools
import importlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.engine.vllm.cpu import (
    compilation,
    drafted_sampling,
    lora_parts,
    prompt_logprobs,
    scored_tokens,
    shared_memory,
)
from lmi_vllm.engine.vllm.workarounds import (
    audio_files,
    engine_context,
    lost_cores,
    lost_workers,
    model_length,
    model_scripts,
    published_tokenizers,
    tokenizer_files,
    unsent_media,
)
from lmi_vllm.errors import EngineStartError

logger = logging.getLogger(__name__)

BESIDE: Final = "|"  # stands for dots in the name of joined classes
CPU_WORKER: Final = "lmi_vllm.engine.vllm.cpu.worker.GuardedCpuWorker"
Replacement = Callable[[Any], Any]  # takes the original, returns the replacement


class Scope(Enum):
    """Where a workaround is in force, and for how long."""

    CONFIGURATION = "in the server on a CPU, while vLLM makes its configuration"
    COMPILED_CODE = "in the server on a CPU, before the engine is forked from it"
    RANKS = "in a worker on a CPU, before it meets the other ranks"
    WORKER = "in a worker on a CPU"
    LORA_WORKER = "in a worker on a CPU with LoRA"
    CLIENT = "in the server, while vLLM makes its client of the engine"
    APPLICATION = "in the server, while vLLM makes its HTTP application"
    LENGTH = "in the server, while vLLM makes its configuration"
    ENGINE = "in the server before it starts the engine, and in the engine's process to its end"
    FORK_SERVER = "in the server, while the fork server starts the processes of an engine"
    TOKENIZERS = "in every process, from before it loads a tokenizer to its end"


@dataclass(frozen=True, slots=True)
class Workaround:
    """A name of vLLM's or torch's that is replaced.

    `fixed_in` is the first release without the defect; empty while none is known. A name that a
    release lacks is skipped, unless answers would be wrong (`is_required`). `adds` is for a name
    that is missing; if it exists, nothing is done.
    """

    target: str  # package.module:name, or package.module:Class.name
    replacement: Replacement
    scope: Scope
    fixed_in: str = ""
    is_required: bool = False
    adds: bool = False


WORKAROUNDS: Final = (
    Workaround(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        lora_parts.guarded,
        Scope.LORA_WORKER,
        is_required=True,
    ),
    Workaround(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
        prompt_logprobs.one_by_one,
        Scope.LORA_WORKER,
        is_required=True,
    ),
    Workaround(
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        drafted_sampling.expanded,
        Scope.WORKER,
        is_required=True,
    ),
    Workaround(
        "vllm.v1.sample.sampler:Sampler.forward",
        scored_tokens.for_its_own_rows,
        Scope.WORKER,
        is_required=True,
    ),
    Workaround(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_only",
        drafted_sampling.top_k_of_any_number,
        Scope.WORKER,
    ),
    Workaround(
        "vllm.v1.sample.sampler:batched_count_greater_than", compilation.uncompiled, Scope.WORKER
    ),
    Workaround(
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm",
        shared_memory.removed_once_joined,
        Scope.RANKS,
    ),
    Workaround(
        "vllm.model_executor.models.registry:_run_in_subprocess",
        compilation.in_this_process,
        Scope.CONFIGURATION,
    ),
    Workaround(
        "torch._inductor.codecache:_HEADER_DIR", compilation.kept_headers, Scope.COMPILED_CODE
    ),
    Workaround(
        "torch._inductor.codecache:_HEADER_LOCK_DIR",
        compilation.kept_header_locks,
        Scope.COMPILED_CODE,
    ),
    Workaround(
        "torch._dynamo.aot_compile_types:BundledAOTAutogradSerializableCallable.finalize_loading",
        compilation.nothing_to_finalize,
        Scope.COMPILED_CODE,
        adds=True,
    ),
    Workaround(
        "vllm.triton_utils.dispatcher:vars", compilation.names_of, Scope.COMPILED_CODE, adds=True
    ),
    Workaround("vllm.triton_utils.dispatcher:sys", compilation.Kernels, Scope.COMPILED_CODE),
    Workaround(
        "vllm.multimodal.cache.factories:LruKeyReplicatedSenderCache",
        unsent_media.once_sent,
        Scope.CLIENT,
    ),
    Workaround(
        "model_hosting_container_standards.sagemaker:bootstrap",
        model_scripts.left_out,
        Scope.APPLICATION,
    ),
    Workaround(
        "vllm.entrypoints.speech_to_text.base.serving:"
        "SpeechToTextBaseServing._decode_and_chunk_speech",
        audio_files.checked,
        Scope.APPLICATION,  # an object of it keeps the method that it is made with
    ),
    Workaround("vllm.config.model:_get_and_verify_max_len", model_length.served, Scope.LENGTH),
    Workaround(
        "vllm.v1.executor.multiproc_executor:WorkerProc.wait_for_ready",
        lost_workers.named,
        Scope.ENGINE,
    ),
    Workaround("vllm.v1.engine.core_client:BackgroundResources", lost_cores.noted, Scope.CLIENT),
    Workaround(
        "vllm.utils.system_utils:multiprocessing", engine_context.OneContext, Scope.FORK_SERVER
    ),
    Workaround(
        "transformers.models.auto.tokenization_auto:AutoTokenizer.from_pretrained",
        tokenizer_files.as_in_their_files,
        Scope.TOKENIZERS,
    ),
    Workaround(
        "transformers.models.auto.tokenization_auto:get_class_from_dynamic_module",
        published_tokenizers.adapted,
        Scope.TOKENIZERS,
    ),
    Workaround(
        "transformers.tokenization_python:PythonBackend.convert_ids_to_tokens",
        published_tokenizers.of_any_id,
        Scope.TOKENIZERS,
    ),
    Workaround(
        "transformers.convert_slow_tokenizer:SpmConverter.build_tokenizer_from_spm_proto",
        published_tokenizers.with_its_blank,
        Scope.TOKENIZERS,
    ),
    Workaround(
        "transformers.tokenization_utils_tokenizers:TokenizersBackend._convert_from_sentencepiece",
        published_tokenizers.with_its_bos,
        Scope.TOKENIZERS,
    ),
)


# The first release without a defect of which something outside `apply` takes care.
FIXED_IN: Final = MappingProxyType(
    {"own_scales": "0.32", "silent_ends": "0.32", "zero_adapter": "0.33"}
)


def is_needed(name: str) -> bool:
    """Whether the installed vLLM has a defect of `FIXED_IN`."""
    return is_affected("vllm", FIXED_IN[name])


def apply(scope: Scope) -> contextlib.ExitStack:
    """Apply every workaround of the scope; closing the returned object undoes them.

    Raises:
        EngineStartError: this release has not the name that one needs without which answers would
            be wrong.
    """
    done = contextlib.ExitStack()
    for row in WORKAROUNDS:
        package = row.target.partition(".")[0]
        if row.scope is scope and is_affected(package, row.fixed_in) and _is_wanted(row):
            logger.debug("%s is replaced %s", row.target, scope.value)
            done.enter_context(replace(row.target, row.replacement))
    return done


@functools.cache
def apply_to_the_end(scope: Scope) -> contextlib.ExitStack:
    """Apply every workaround of the scope, once in a process, until the object is closed."""
    return apply(scope)


def _is_wanted(row: Workaround) -> bool:
    if row.adds:
        with contextlib.suppress(ImportError, AttributeError):
            owner, name = _owner(row.target)
            return not hasattr(owner, name)
        return False
    if has_name(row.target):
        return True
    if row.is_required:
        raise EngineStartError(f"this vLLM has no {row.target}, which has to be worked around")
    logger.debug("no %s here: nothing to work around", row.target)
    return False


def replace(target: str, replacement: Replacement) -> contextlib.ExitStack:
    """Replace the object by `replacement(object)`; closing the returned object restores it."""
    owner, name = _owner(target)
    undo = contextlib.ExitStack()
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, replacement(getattr(owner, name, None)))
    return undo


def current(target: str) -> Any:
    """Return the named object; None if the installed release lacks it."""
    try:
        owner, name = _owner(target)
    except (ImportError, AttributeError):
        return None
    return getattr(owner, name, None)


def has_name(target: str) -> bool:
    """Whether the installed release has the named thing."""
    return current(target) is not None


def is_affected(package: str, fixed_in: str) -> bool:
    """Whether the installed release of a package is before `fixed_in`; any release is before ""."""
    if not fixed_in:
        return True
    version = str(importlib.import_module(package).__version__)
    return _numbers(version) < _numbers(fixed_in)


def joined_name(ours: str, other: str) -> str:
    """Return the name of our class, joined with `other` unless that is empty: vLLM takes one name.

    vLLM looks the name up in the module before its last dot. That is ours, whose `__getattr__`
    joins the classes.
    """
    return f"{ours}{BESIDE}{other.replace('.', BESIDE)}" if other else ours


@functools.cache  # a worker compares classes
def joined_class(ours: type, name: str) -> type:
    """Return our class joined with the one in the rest of `name`.

    Raises:
        AttributeError: the name begins with another than that of our class.
    """
    first, is_both, others = name.partition(BESIDE)
    if not is_both or first != ours.__name__:
        raise AttributeError(f"module {ours.__module__} has no attribute {name}")
    module, _, qualified = others.replace(BESIDE, ".").rpartition(".")
    other = getattr(importlib.import_module(module), qualified)
    return type(name, (ours, other), {})


def _owner(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    return functools.reduce(getattr, owners, owner), name


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a release: a build of 0.33.0 is not before 0.33."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
