"""What works around a defect of vLLM or torch: one module each, and the one list of all of it.

A row of `WORKAROUNDS` replaces a name. It is in force only in its scope and for the releases it is
for, and can be undone. A row of `ELSEWHERE` is used where it belongs, which it names. Each row
names the test that says when it may go.
This module imports no vLLM: a row names what it replaces, and it is imported when it is applied.
Below the list is what joins classes of ours with an operator's.
"""

import contextlib
import functools
import importlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from lmi_vllm.engine.vllm.workarounds import (
    base_rows,
    cpu_compilation,
    model_scripts,
    prompt_logprobs,
)
from lmi_vllm.errors import EngineStartError

logger = logging.getLogger(__name__)

BESIDE: Final = "|"  # stands for dots in the name of joined classes
CPU_WORKER: Final = "lmi_vllm.engine.vllm.workarounds.cpu_worker.GuardedCpuWorker"
Replacement = Callable[[Any], Any]  # takes what is there, returns what stands for it


class Scope(Enum):
    """Where and for how long a workaround is in force."""

    CONFIGURATION = "in the server on a CPU, while vLLM makes its configuration"
    COMPILED_CODE = "in the server on a CPU, before the engine is forked from it"
    WORKER = "in a worker on a CPU"
    LORA_WORKER = "in a worker on a CPU with LoRA"
    APPLICATION = "in the server, while vLLM makes its HTTP application"


@dataclass(frozen=True, slots=True)
class Workaround:
    """A name of vLLM's or torch's that is replaced.

    `fixed_in` is the first release without the defect; empty while no release is known. A name that
    a release does not have is passed over, unless answers would be wrong (`is_required`);
    `adds` is for a name that is missing, and nothing is done where it is there.
    """

    target: str  # package.module:name, or package.module:Class.name
    replacement: Replacement
    scope: Scope
    test: str  # the file and function below tests/ or integration/
    fixed_in: str = ""
    is_required: bool = False
    adds: bool = False


WORKAROUNDS: Final = (
    Workaround(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        base_rows.skipping_base_rows,
        Scope.LORA_WORKER,
        "tests/contract/test_base_rows.py:test_plain_vllm_computes_base_rows_with_an_adapter",
        is_required=True,
    ),
    Workaround(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
        prompt_logprobs.one_by_one,
        Scope.LORA_WORKER,
        "tests/contract/test_adapter_isolation.py:"
        "test_prompt_logprobs_in_a_batch_equal_those_alone",
        is_required=True,
    ),
    Workaround(
        "vllm.v1.sample.sampler:batched_count_greater_than",
        cpu_compilation.uncompiled,
        Scope.WORKER,
        "integration/nothing_stalls_while_serving.py:test_nothing_is_compiled_on_cpu",
    ),
    Workaround(
        "vllm.model_executor.models.registry:_run_in_subprocess",
        cpu_compilation.in_this_process,
        Scope.CONFIGURATION,
        "tests/contract/test_workarounds.py:test_plain_vllm_starts_a_process_to_inspect_a_model_class",
    ),
    Workaround(
        "torch._inductor.codecache:_HEADER_DIR",
        cpu_compilation.kept_headers,
        Scope.COMPILED_CODE,
        "integration/compile_cache_is_kept.py:test_second_container_does_not_compile",
    ),
    Workaround(
        "torch._inductor.codecache:_HEADER_LOCK_DIR",
        cpu_compilation.kept_header_locks,
        Scope.COMPILED_CODE,
        "integration/compile_cache_is_kept.py:test_second_container_does_not_compile",
    ),
    Workaround(
        "torch._dynamo.aot_compile_types:BundledAOTAutogradSerializableCallable.finalize_loading",
        cpu_compilation.nothing_to_finalize,
        Scope.COMPILED_CODE,
        "integration/compile_cache_is_kept.py:test_second_container_does_not_compile",
        adds=True,
    ),
    Workaround(
        "model_hosting_container_standards.sagemaker:bootstrap",
        model_scripts.left_out,
        Scope.APPLICATION,
        "tests/contract/test_bridge.py:test_script_of_the_model_is_not_vllm_s_to_run",
    ),
)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What acts outside `apply`: a module of this folder, or a name of vLLM's for a feature."""

    place: str  # what applies it, below engine/vllm/
    test: str  # the function, below tests/ or integration/
    fixed_in: str = ""


ELSEWHERE: Final = {
    "vllm.v1.engine.core_client:launch_core_engines": Elsewhere(
        "async_llm.py", "test_the_queue_is_one"
    ),
    "adapter_slots": Elsewhere("adapters.py", "test_all_slots_pinned_refuses_the_next_adapter"),
    "companions": Elsewhere("factory.py", "test_companions_are_checked_only_with_a_cpu_torch"),
    "cpu_worker": Elsewhere("workarounds/__init__.py", "test_two_ranks_answer_as_one"),
    "decoded_media": Elsewhere(
        "workarounds/hostile_requests.py", "test_large_image_is_refused_before_it_is_decoded"
    ),
    "hostile_requests": Elsewhere(
        "engine.py", "test_hostile_constraint_is_refused_and_others_go_on"
    ),
    "ignored_modules": Elsewhere("configuration.py", "test_modules_that_vllm_ignores_are_refused"),
    "not_finite": Elsewhere("configuration.py", "test_plain_vllm_corrupts_every_later_answer"),
    "text_lengths": Elsewhere("engine.py", "test_long_text_is_refused_before_it_is_converted"),
    "zero_adapter": Elsewhere(
        "async_llm.py",
        "test_base_rows_stay_base_with_a_foreign_worker",
        fixed_in="0.33",
    ),
}


def is_needed(name: str) -> bool:
    """Whether the installed vLLM has the defect of a row of `ELSEWHERE`."""
    return is_affected("vllm", ELSEWHERE[name].fixed_in)


def apply(scope: Scope) -> contextlib.ExitStack:
    """Put every workaround of the scope into force; closing what is returned undoes them.

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


def _is_wanted(row: Workaround) -> bool:
    if row.adds:
        owner = row.target.rpartition(".")[0]
        return has_name(owner) and not has_name(row.target)
    if has_name(row.target):
        return True
    if row.is_required:
        raise EngineStartError(f"this vLLM has no {row.target}, which has to be worked around")
    logger.debug("no %s here: nothing to work around", row.target)
    return False


def replace(target: str, replacement: Replacement) -> contextlib.ExitStack:
    """Put `replacement(what is there)` in place; closing what is returned puts back what was."""
    owner, name = _owner(target)
    undo = contextlib.ExitStack()
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, replacement(getattr(owner, name, None)))
    return undo


def current(target: str) -> Any:
    """Return the named thing as it is now; None where the installed release has none."""
    try:
        owner, name = _owner(target)
    except (ImportError, AttributeError):
        return None
    return getattr(owner, name, None)


def has_name(target: str) -> bool:
    """Whether the installed release has the named thing."""
    return current(target) is not None


def is_affected(package: str, fixed_in: str) -> bool:
    """Whether the installed release of a package comes before `fixed_in`; of any, before ""."""
    if not fixed_in:
        return True
    version = str(importlib.import_module(package).__version__)
    return _numbers(version) < _numbers(fixed_in)


def joined_name(ours: str, other: str) -> str:
    """Return the name of our class, joined with `other` unless that is empty: vLLM takes one.

    vLLM looks it up in the module before its last dot: ours, whose `__getattr__` has it joined.
    """
    return f"{ours}{BESIDE}{other.replace('.', BESIDE)}" if other else ours


@functools.cache  # a worker compares classes
def joined_class(ours: type, name: str) -> type:
    """Return our class joined with the one that the rest of `name` says.

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
