"""vLLM's configuration: our engine arguments as its command line would have them, and what we add.

Two arguments ask for Ray. Whether Ray can be used is checked before the engine starts. vLLM says so
only in the engine's process, after the download, and without a remedy.
"""

import contextlib
import copy
import logging
import math
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from enum import EnumMeta
from typing import Any, Final, Self, get_args, get_type_hints

import psutil
from pydantic import ConfigDict, TypeAdapter, ValidationError
from vllm import envs
from vllm.config import quantization
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.triton_utils import HAS_TRITON
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.executor import ray_utils
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.names import current_platform
from lmi_vllm.engine.vllm.processes import CHOSEN_VARIABLE, register_models
from lmi_vllm.engine.vllm.workarounds import CPU_WORKER, Scope
from lmi_vllm.engine.vllm.workarounds.ignored_modules import inspect_adapters
from lmi_vllm.engine.vllm.workarounds.not_finite import end_not_finite
from lmi_vllm.errors import ConfigurationError, EngineStartError
from lmi_vllm.host_memory import free_host_memory
from lmi_vllm.messages import EngineArguments

try:  # 0.33 moved it; the old path is the one of 0.32
    from vllm.entrypoints.common.cli_args import FrontendArgs, make_arg_parser
except ImportError:
    from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser


logger = logging.getLogger(__name__)

# Without a size of its own vLLM's CPU engine takes 92 % of the machine's memory for the KV cache.
CPU_KV_CACHE_BYTES: Final = 4 << 30
CPU_KV_CACHE_FRACTION: Final = 4  # at most a quarter of the free memory, of all ranks together
_RAY_ARGUMENTS: Final = ("distributed_executor_backend", "data_parallel_backend")
_OTHERWISE: Final = "Without Ray: mp on one machine, DJL_CLUSTER_SIZE for several"
_WHOLE: Final = ("top_k", "max_new_tokens")
_DEFAULTS: Final = (  # of requests, in generation_config.json (vLLM 0.32: config/model.py)
    *_WHOLE, "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_p",
    "min_p",
)  # fmt: skip
_LAX: Final = ConfigDict(arbitrary_types_allowed=True)  # torch.dtype is one

_RANK_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True)
class VllmArguments:
    """Arguments, and the namespace of `vllm serve` for them."""

    given: EngineArguments
    namespace: Namespace

    @classmethod
    def of(cls, arguments: EngineArguments, checked: Self | None = None) -> Self:
        """These arguments; those that were `checked` are not read again.

        Raises:
            ConfigurationError: one problem per value that vLLM's own types refuse.
        """
        written = vars(quantization)  # of a type that is written as text
        types = get_type_hints(FrontendArgs) | get_type_hints(AsyncEngineArgs, localns=written)
        known = {} if checked is None else checked.given.values
        typed, problems = {}, []
        for name, value in arguments.values.items():
            shown = f"{name} ({arguments.origin_of(name)})"
            if name not in types:
                problems.append(f"{shown}: the installed vLLM has no such engine argument")
            elif checked is not None and name in known and known[name] == value:
                typed[name] = copy.deepcopy(getattr(checked.namespace, name))  # vLLM changes some
            elif value is not None:
                try:
                    typed[name] = _typed(types[name], value)
                except ValidationError as error:
                    reasons = "; ".join(one["msg"] for one in error.errors())
                    problems.append(f"{shown}: vLLM refuses {value!r}: {reasons}")
        if problems:
            raise ConfigurationError(problems)
        defaults = make_arg_parser(FlexibleArgumentParser(add_help=False)).parse_args([])
        return cls(arguments, Namespace(**{**vars(defaults), **typed}))


def _typed(kind: Any, value: object) -> Any:
    """Return the value as vLLM's command line hands it on: a mapping may become a class of its.

    Of its enums it takes names, and looks them up later.
    """
    parts: tuple[Any, ...] = (kind, *get_args(kind))
    if isinstance(value, str) and any(isinstance(one, EnumMeta) for one in parts):
        return value
    wanted: Any = next((one for one in parts if is_dataclass(one)), kind)
    given = dict(value) if isinstance(value, Mapping) else value
    return TypeAdapter(wanted | None, config=_LAX).validate_python(given)


def engine_args_from(namespace: Namespace) -> AsyncEngineArgs:
    """Return vLLM's engine arguments for a parsed namespace."""
    return AsyncEngineArgs.from_cli_args(namespace)


def engine_config(
    namespace: Namespace,
    clients: int,
    client: int,
    *,
    is_cpu: bool,
    names: Sequence[str] = (),
    headless: bool = False,
) -> Any:
    """Return vLLM's configuration for an engine with this many clients.

    The first of the `names` that requests use is `model_name` in vLLM's series, as in `vllm serve`:
    llm-d's router takes another name for an adapter.
    """
    register_models()
    engine_args = engine_args_from(namespace)
    if names:
        engine_args.served_model_name = [*names]
    if clients > 1:  # vLLM sets it for its own --api-server-count
        engine_args._api_process_count = clients
        engine_args._api_process_rank = client
    with workarounds.apply(Scope.LENGTH), worked_around(Scope.CONFIGURATION, is_cpu=is_cpu):
        config = engine_args.create_engine_config(headless=headless)
    if is_cpu:
        _check_cpu_head_size(config.model_config)
        _check_cpu_adapters(config)
    if config.model_config.runner_type == "generate":
        _check_generation(config.model_config)
    inspect_adapters(config)
    end_not_finite(config)
    return config


def worked_around(scope: Scope, *, is_cpu: bool) -> contextlib.AbstractContextManager[object]:
    """Apply the workarounds of a scope while the body runs, on a CPU only."""
    return workarounds.apply(scope) if is_cpu else contextlib.nullcontext()


def adjusted_for_cpu(arguments: EngineArguments) -> EngineArguments:
    """Return the arguments with our additions for a CPU; each is logged."""
    added = _cpu_adjustments(arguments)
    os.environ.pop(CHOSEN_VARIABLE, None)
    if "kv_cache_memory_bytes" in added:  # the worker may take less
        os.environ[CHOSEN_VARIABLE] = str(_ranks_here(arguments))
    return replace(arguments, values={**arguments.values, **added})


def _cpu_adjustments(arguments: EngineArguments) -> dict[str, object]:
    values = arguments.values
    added: dict[str, object] = {}
    if all(arguments.number(name, 1) == 1 for name in (*_RANK_SIZES, "nnodes")):
        # One child instead of two: the worker lives in the engine core.
        added |= _unless_set(values, "distributed_executor_backend", "uni")
    if "gpu_memory_utilization" not in values:
        free = free_host_memory() or psutil.virtual_memory().available
        size = min(CPU_KV_CACHE_BYTES, free // CPU_KV_CACHE_FRACTION // _ranks_here(arguments))
        added |= _unless_set(values, "kv_cache_memory_bytes", size)
    if values.get("worker_cls") in (None, "auto"):
        added["worker_cls"] = CPU_WORKER
    elif values.get("enable_lora"):
        # One more slot, for the adapter of base rows (cpu/zero_adapter.py).
        added["max_loras"] = arguments.number("max_loras", 1) + 1
        if kept := arguments.number("max_cpu_loras", 0):
            added["max_cpu_loras"] = kept + 1
    for name, value in added.items():
        logger.info("engine argument %s=%s (set by lmi_vllm on CPU)", name, value)
    return added


def _ranks_here(arguments: EngineArguments) -> int:
    """Return the number of workers on this node, of all data parallel engines."""
    ranks = math.prod(arguments.number(name, 1) for name in _RANK_SIZES)
    return max(1, ranks // max(1, arguments.number("nnodes", 1)))


def _unless_set(values: Mapping[str, object], name: str, value: object) -> dict[str, object]:
    return {} if values.get(name) is not None else {name: value}


def _check_generation(model_config: Any) -> None:
    """Refuse defaults of requests that no request could carry.

    A text as the end token ends the engine's thread that takes requests: none is answered.
    """
    stated = model_config.try_get_generation_config()
    ends = stated.get("eos_token_id")
    given = {**stated, **model_config.override_generation_config}
    wrong = {name: given.get(name) for name in _DEFAULTS if not _is_number(given.get(name))}
    wrong |= {one: given[one] for one in _WHOLE if isinstance(given.get(one), float)}
    if not all(type(one) is int for one in (ends if isinstance(ends, list) else (ends or 0,))):
        wrong["eos_token_id"] = ends
    for name, value in wrong.items():
        wanted = "a whole number" if name in _WHOLE else "a number"
        wanted = "an id or a list of ids" if name == "eos_token_id" else wanted
        raise EngineStartError(
            f"generation_config.json (or config.json, or option.override_generation_config): "
            f"{name} is {value!r}, and {wanted} is needed"
        )


def _is_number(value: object) -> bool:
    return value is None or type(value) in (int, float)


def _check_cpu_head_size(model_config: Any) -> None:
    """Refuse a head size with which vLLM's CPU kernel fails later."""
    if model_config.use_mla:  # DeepSeek's latent attention has a kernel of its own
        return
    head_size = model_config.get_head_size()
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if head_size and head_size not in supported and not model_config.is_attention_free:
        raise EngineStartError(
            f"the model's attention head size is {head_size}; vLLM on CPU supports "
            + ", ".join(map(str, supported))
        )


def _check_cpu_adapters(config: Any) -> None:
    """Refuse LoRA where a CPU cannot compute it.

    Layers of experts need Triton even without an adapter. A decoder's layers over an encoder's
    states (Whisper) have more rows than the step has tokens: a request with an adapter would end
    the engine.
    """
    model, reason = config.model_config, ""
    if model.is_moe and not HAS_TRITON:
        reason = (
            "a mixture of experts, whose LoRA layers in vLLM need Triton, and there is none on "
            "this CPU"
        )
    elif model.is_encoder_decoder:
        reason = "an encoder with a decoder, whose LoRA layers vLLM cannot compute on a CPU"
    if config.lora_config is not None and reason:
        raise EngineStartError(
            f"enable_lora: the model is {reason}; start without enable_lora, or on a GPU"
        )


def ray_problems(arguments: EngineArguments) -> list[str]:
    """Return why Ray cannot be used as the arguments ask; empty if it can, or is not asked for."""
    asked = [f"{name}=ray ({arguments.origin_of(name)})" for name in _RAY_ARGUMENTS
             if arguments.values.get(name) == "ray"]  # fmt: skip
    reason = _reason_against_ray() if asked else ""
    return [f"{word} is not possible: {reason}. {_OTHERWISE}" for word in asked if reason]


def _reason_against_ray() -> str:
    if not current_platform.ray_device_key:
        return f"vLLM's platform here is {current_platform.device_name}, which does not support Ray"
    if not ray_utils.ray_is_available():
        return f"Ray cannot be imported ({ray_utils.ray_import_err}): pip install ray on every node"
    return ""


def runs_on_cpu() -> bool:
    """Whether vLLM's processes compute on the CPU here."""
    return bool(current_platform.is_cpu())


def headless_workers(config: Any) -> Any:
    """Start the workers of a node that has no front end, and return what watches them."""
    return MultiprocExecutor(config, monitor_workers=False)


def cache_environment() -> None:
    """Cache vLLM's environment variables, as its engine does: it reads one for each token."""
    envs.enable_envs_cache()


def release_environment() -> None:
    """Drop the cache, so that vLLM reads its variables again."""
    envs.disable_envs_cache()
