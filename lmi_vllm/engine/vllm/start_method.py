"""Why the engine's process is spawned and not forked; a forked one need not import vLLM again.

On a CPU it is always forked. On an NVIDIA GPU that is safe while the CUDA driver has not been
initialised in this process (CUDA's Programming Guide: a context does not survive a fork), and while
no thread runs here whose library does not survive one.
"""

import ctypes
import threading
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from lmi_vllm.engine.vllm.names import current_platform
from lmi_vllm.messages import EngineArguments

_DRIVER: Final = "libcuda.so.1"
_NOT_INITIALIZED: Final = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
_THREADS: Final = Path("/proc/self/task")
# Beginnings of the names that libraries give their native threads (at most 15 bytes, comm of
# proc(5)): what a fork leaves of these libraries waits for threads that the child does not have.
UNFIT_THREADS: Final = MappingProxyType(
    {
        "cuda-": "the CUDA driver",
        "grpc": "gRPC",
        "event_engine": "gRPC",
        "timer_manager": "gRPC",
        "resolver-execut": "gRPC",
        "ray::": "Ray",
        "raylet_client": "Ray",
    }
)


def why_spawned(arguments: EngineArguments, *, is_cpu: bool) -> str:
    """Return why the engine's process cannot be forked from this one; empty if it can."""
    return "" if is_cpu else _why_always_spawned(arguments) or why_unfit()


def can_become_unfit(arguments: EngineArguments, *, is_cpu: bool) -> bool:
    """Whether this process may fork no engine later, where one that is fit still could."""
    return not is_cpu and not _why_always_spawned(arguments)


def _why_always_spawned(arguments: EngineArguments) -> str:
    """Return why no process forks the engine of a GPU, fit or not; empty if one can."""
    if not current_platform.is_cuda():
        return f"vLLM's platform here is {current_platform.device_name}, not CUDA"
    values = arguments.values
    if arguments.number("nnodes", 1) > 1 or "ray" in (
        values.get("distributed_executor_backend"),
        values.get("data_parallel_backend"),
    ):
        return "the engine has processes on other nodes, or Ray's"
    if values.get("numa_bind"):  # vLLM binds by the command line of a new process
        return "numa_bind needs a new process"
    return ""


def why_unfit() -> str:
    """Return why no process can be forked from this one; empty if one can."""
    if torch.cuda.is_initialized() or driver_is_initialized():
        return "CUDA is initialised in the server's process"
    if library := unfit_library(_native_thread_names()):
        return f"threads of {library} run in the server's process"
    return ""


def driver_is_initialized() -> bool:
    """Whether the CUDA driver is initialised in this process, by whatever library; asks only.

    `torch.cuda.is_initialized` does not see other libraries, or users' code that calls the driver.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return int(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))) != _NOT_INITIALIZED


def unfit_library(names: Iterable[str]) -> str:
    """Return the library of the first thread in `UNFIT_THREADS`; empty without one."""
    return next(
        (
            library
            for name in names
            for start, library in UNFIT_THREADS.items()
            if name.startswith(start)
        ),
        "",
    )


def _native_thread_names() -> list[str]:
    """Return the names of this process's threads that Python did not start."""
    own = {thread.native_id for thread in threading.enumerate()}
    names = []
    for task in _THREADS.iterdir():
        if int(task.name) not in own:
            try:
                names.append((task / "comm").read_text(encoding="utf-8").strip())
            except OSError:  # it has just ended
                continue
    return names
