"""Start vLLM's `AsyncLLM` the fast way that is safe on this platform (DECISIONS.md 8)."""

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from lmi_vllm.engine.vllm.arguments import engine_args_from, parse_vllm_arguments
from lmi_vllm.engine.vllm.clients import SeatedAsyncLLM, client_options, seats_for
from lmi_vllm.engine.vllm.compiled import use_what_is_compiled
from lmi_vllm.engine.vllm.isolation import CPU_WORKER, IsolatingAsyncLLM
from lmi_vllm.engine.vllm.node_bond import bond_port, watch_followers
from lmi_vllm.engine.vllm.processes import (
    ERROR_FILE_VARIABLE,
    SERVER_PID_VARIABLE,
    adopt_forked_engines,
    read_root_cause,
    register_models,
    watch_root_causes,
)
from lmi_vllm.engine.vllm.ray import ray_problems
from lmi_vllm.errors import ConfigurationError, EngineStartError
from lmi_vllm.messages import EngineArguments, EngineSeat

logger = logging.getLogger(__name__)

# Without a size of its own vLLM's CPU engine takes 92 % of the machine's memory for the KV cache.
CPU_KV_CACHE_BYTES: Final = 4 << 30
CPU_KV_CACHE_FRACTION: Final = 4  # at most a quarter of what is free
START_METHOD: Final = "VLLM_WORKER_MULTIPROC_METHOD"  # vLLM's: fork, spawn or forkserver
# As the user set it: vLLM writes its own choice over it at each start, also at one that fails.
ASKED_METHOD: Final = os.environ.get(START_METHOD)
OUT_OF_MEMORY_MARKS: Final = ("OutOfMemory", "MemoryError", "out of memory", "No available memory")


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A running engine, how its OpenAI handlers are to be set up, and what it costs to isolate."""

    llm: IsolatingAsyncLLM
    namespace: Namespace
    is_cpu: bool
    thread: ThreadPoolExecutor  # its one thread is the parent of the engine's processes
    arguments: EngineArguments  # as it was started


def check_arguments(arguments: EngineArguments) -> None:
    """Return when the installed vLLM accepts every argument; called while bytes still arrive.

    Raises:
        ConfigurationError: it does not; in its words, naming the argument and its origin. Or it
            is to use Ray, which it cannot here.
    """
    try:
        # Any existing folder stands for the model, which may not be here yet.
        values = {**arguments.values, "model": os.curdir}
        engine_args_from(parse_vllm_arguments(values, arguments.origins))
    except (ValueError, TypeError) as error:
        raise ConfigurationError([_with_argument(f"vLLM: {error}", arguments)]) from error
    if problems := ray_problems(arguments.values, arguments.origins):
        raise ConfigurationError(problems)


async def start_vllm(
    arguments: EngineArguments, thread: ThreadPoolExecutor, seats: tuple[EngineSeat, ...] = ()
) -> StartedEngine:
    """Start an engine on `thread`; the event loop stays free meanwhile.

    Each of `seats` can be taken by another process with `join_vllm`.

    Raises:
        ConfigurationError: the installed vLLM refuses an argument.
        EngineStartError: the engine did not come up; the text is the root cause.
    """
    start = partial(_start, arguments, thread, seats)
    return await asyncio.get_running_loop().run_in_executor(thread, start)


async def join_vllm(
    arguments: EngineArguments, thread: ThreadPoolExecutor, seat: EngineSeat
) -> StartedEngine:
    """Join, as one more client, the engine that another process has started with `arguments`.

    Raises:
        EngineStartError: it did not work out; the text is the root cause.
    """
    join = partial(_join, arguments, thread, seat)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, join)
    except Exception as error:
        text = f"the engine could not be joined: {type(error).__name__}: {error}"
        raise EngineStartError(text) from error


def _start(
    arguments: EngineArguments, thread: ThreadPoolExecutor, seats: tuple[EngineSeat, ...]
) -> StartedEngine:
    if arguments.number("nnodes", 1) > 1:
        port = bond_port(arguments.number("master_port", 0))
        watch_followers(os.environ["VLLM_HOST_IP"], port)
    with starting(arguments) as is_cpu:
        return _start_configured(arguments, thread, seats, is_cpu=is_cpu)


@contextlib.contextmanager
def starting(arguments: EngineArguments) -> Iterator[bool]:
    """Prepare for processes of vLLM's; yields whether they run on the CPU.

    Raises:
        EngineStartError: whatever went wrong meanwhile; the text is the root cause.
    """
    is_cpu = bool(current_platform.is_cpu())
    with tempfile.TemporaryDirectory(prefix="lmi-vllm-start-") as folder:
        error_file = Path(folder) / "engine-errors"
        with _engine_environment(error_file, is_cpu=is_cpu):
            try:
                yield is_cpu
            except (ConfigurationError, EngineStartError):
                raise
            except Exception as error:
                raise _start_error(error, error_file, arguments) from error


def _start_configured(
    arguments: EngineArguments,
    thread: ThreadPoolExecutor,
    seats: tuple[EngineSeat, ...],
    *,
    is_cpu: bool,
) -> StartedEngine:
    if is_cpu:
        values = {**arguments.values, **_cpu_adjustments(arguments)}
        arguments = replace(arguments, values=values)
    namespace = parse_vllm_arguments(arguments.values, arguments.origins)
    config = _engine_config(namespace, 1 + len(seats), 0, is_cpu=is_cpu)
    if is_cpu:
        _prepare_cpu(config)
    own_length = config.model_config.max_model_len
    with seats_for(seats) if seats else contextlib.nullcontext():
        llm = IsolatingAsyncLLM.from_vllm_config(
            config,
            enable_log_requests=namespace.enable_log_requests,
            disable_log_stats=namespace.disable_log_stats,
            client_count=1 + len(seats),
        )
    if (fitted := config.model_config.max_model_len) < own_length:
        logger.warning(
            "max_model_len: the model's own length is %d, its KV cache fits %d; set max_model_len, "
            "or give the KV cache more memory",
            own_length,
            fitted,
        )
    return StartedEngine(llm, namespace, is_cpu, thread, arguments)


def follower_config(arguments: EngineArguments, *, is_cpu: bool) -> Any:
    """Return the configuration of a node that has workers and no engine core."""
    if is_cpu:
        values = {**arguments.values, **_cpu_adjustments(arguments)}
        arguments = replace(arguments, values=values)
    namespace = parse_vllm_arguments(arguments.values, arguments.origins)
    config = _engine_config(namespace, 1, 0, is_cpu=is_cpu, headless=True)
    if is_cpu:
        _prepare_cpu(config)
    return config


def _prepare_cpu(config: Any) -> None:
    _check_cpu_head_size(config.model_config)
    use_what_is_compiled(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
    if sys.platform == "linux":
        # create_engine_config() has just set "spawn"; everything is imported here already.
        os.environ[START_METHOD] = ASKED_METHOD or "fork"
        adopt_forked_engines()


def _join(
    arguments: EngineArguments, thread: ThreadPoolExecutor, seat: EngineSeat
) -> StartedEngine:
    os.environ[SERVER_PID_VARIABLE] = str(os.getpid())  # of the children that try grammars
    is_cpu = bool(current_platform.is_cpu())
    namespace = parse_vllm_arguments(arguments.values, arguments.origins)
    config = _engine_config(namespace, seat.clients, seat.index, is_cpu=is_cpu)
    if is_cpu and sys.platform == "linux":
        adopt_forked_engines()
    llm = SeatedAsyncLLM.from_vllm_config(
        config,
        enable_log_requests=namespace.enable_log_requests,
        disable_log_stats=namespace.disable_log_stats,
        **client_options(seat),
    )
    return StartedEngine(llm, namespace, is_cpu, thread, arguments)


def _engine_config(
    namespace: Namespace, clients: int, client: int, *, is_cpu: bool, headless: bool = False
) -> Any:
    """Return vLLM's configuration for one of so many clients of an engine."""
    register_models()
    engine_args = engine_args_from(namespace)
    if clients > 1:  # what vLLM sets for its own --api-server-count
        engine_args._api_process_count = clients
        engine_args._api_process_rank = client
    with _inspect_in_process() if is_cpu else contextlib.nullcontext():
        return engine_args.create_engine_config(headless=headless)


def _cpu_adjustments(arguments: EngineArguments) -> dict[str, object]:
    """Return the arguments we add on CPU; each is logged, none replaces what was set."""
    values = arguments.values
    added: dict[str, object] = {}
    parallel = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes")
    if not any(arguments.number(name, 1) > 1 for name in parallel):
        # One child instead of two: the worker lives in the engine core.
        added |= _unless_set(values, "distributed_executor_backend", "uni")
    if "gpu_memory_utilization" not in values and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        free = psutil.virtual_memory().available // CPU_KV_CACHE_FRACTION
        added |= _unless_set(values, "kv_cache_memory_bytes", min(CPU_KV_CACHE_BYTES, free))
    if values.get("worker_cls") in (None, "auto"):
        added["worker_cls"] = CPU_WORKER
    elif values.get("enable_lora"):
        # One slot more, for the all-zero adapter that base rows carry (engine-notes.md 2).
        added["max_loras"] = arguments.number("max_loras", 1) + 1
        if kept := arguments.number("max_cpu_loras", 0):
            added["max_cpu_loras"] = kept + 1
    for name, value in added.items():
        logger.info("engine argument %s=%s (set by lmi_vllm on CPU)", name, value)
    return added


def _unless_set(values: Mapping[str, object], name: str, value: object) -> dict[str, object]:
    return {} if values.get(name) is not None else {name: value}


@contextlib.contextmanager
def _engine_environment(error_file: Path, *, is_cpu: bool) -> Iterator[None]:
    """Say in the environment and the log set-up what engine processes must know."""
    os.environ[SERVER_PID_VARIABLE] = str(os.getpid())
    os.environ[ERROR_FILE_VARIABLE] = str(error_file)
    if is_cpu:
        # Lets the CPU platform keep the `uni` executor; the engine core is a child all the same.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    stop_watching = watch_root_causes(str(error_file))
    try:
        yield
    finally:
        stop_watching()
        os.environ.pop(ERROR_FILE_VARIABLE, None)


@contextlib.contextmanager
def _inspect_in_process() -> Iterator[None]:
    """Let vLLM inspect a model class here and not in a new process (11 s for a new class).

    vLLM uses a process of its own so as not to initialise CUDA; without CUDA there is no such
    reason, and the class is wanted here anyhow before the engine forks.
    """
    name = "_run_in_subprocess"
    original: Callable[[Callable[[], Any]], Any] | None = getattr(registry, name, None)
    if original is None:  # a later vLLM does it otherwise: then it costs the seconds
        yield
        return
    setattr(registry, name, lambda function: function())
    try:
        yield
    finally:
        setattr(registry, name, original)


def _check_cpu_head_size(model_config: Any) -> None:
    """Refuse before the start what the CPU kernel refuses at the first request, dying."""
    if model_config.use_mla:  # DeepSeek's latent attention has a kernel of its own
        return
    head_size = model_config.get_head_size()
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if head_size and head_size not in supported and not model_config.is_attention_free:
        raise EngineStartError(
            f"the model's attention head size is {head_size}; vLLM on CPU supports "
            + ", ".join(map(str, supported))
        )


def _start_error(
    error: Exception, error_file: Path, arguments: EngineArguments
) -> EngineStartError:
    cause = read_root_cause(error_file) or f"{type(error).__name__}: {error}"
    text = " ".join(cause.split())
    if any(mark in text for mark in OUT_OF_MEMORY_MARKS):
        text = (
            f"OOM: {text}. Lower gpu_memory_utilization or max_model_len; with LoRA also "
            "max_loras or max_lora_rank"
        )
    return EngineStartError(_with_argument(f"the engine did not start: {text}", arguments))


def _with_argument(text: str, arguments: EngineArguments) -> str:
    """Say which argument has the value that vLLM names, as it seldom does itself."""
    text = " ".join(text.split())
    named = [
        f"{name} from {arguments.origins.get(name, 'default')}"
        for name, value in arguments.values.items()
        if isinstance(value, str) and name != "model" and repr(value) in text
    ]
    return f"{text} ({', '.join(named)})" if named else text
