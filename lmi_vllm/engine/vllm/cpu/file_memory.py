"""Files in a container's memory, which vLLM's CPU worker takes for used memory.

In a container with a limit it subtracts all that the control group has in memory from the limit,
weights included that it has read a moment before. It refuses to start, though the kernel would drop
them for a process that asks for memory. On a machine without a limit it counts them as free. So the
worker asks here, where vLLM would refuse.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: in a container of twice the weights the start fails, "less than requested memory for kv".
May go: when test_plain_vllm_takes_files_for_used_memory fails.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import psutil

from lmi_vllm.engine.vllm.processes import is_cache_chosen
from lmi_vllm.host_memory import GroupMemory, container_memory, free_host_memory

logger = logging.getLogger(__name__)

_GIB: Final = 1 << 30
_REFUSAL: Final = "Available memory on node"


@contextlib.contextmanager
def share_of_container(cache_config: Any) -> Iterator[None]:
    """Let the worker begin if the share of the container that it is to take has room.

    vLLM compares the two only where the size of the cache is not given: it is while the body runs.
    """
    container = container_memory()
    if container is None or cache_config.kv_cache_memory_bytes is not None:
        yield
        return
    wanted = math.ceil(container.limit * cache_config.gpu_memory_utilization)
    if wanted <= container.free:
        cache_config.kv_cache_memory_bytes = wanted
    try:
        yield
    except ValueError as error:
        raise _with_free(error, container) from error
    finally:
        cache_config.kv_cache_memory_bytes = None


def kv_cache_bytes(
    determine: Callable[[], int], given: int | None, share: int, ranks: int = 1
) -> int:
    """Return the size of the KV cache by vLLM's `determine`, or one that has room.

    Args:
        determine: vLLM's own way, which raises ValueError.
        given: bytes that the cache shall have, if they are given.
        share: bytes that the worker shall take with all that it has.
        ranks: workers that have a cache each in this memory.
    """
    try:
        return determine()
    except ValueError as error:
        if not str(error).startswith(_REFUSAL):
            raise
        container = container_memory()
        wanted = share - psutil.Process().memory_info().rss if given is None else given
        if container is not None and 0 < wanted <= container.free:
            logger.info(
                "the KV cache of %.2f GiB takes the place of files in this container's memory: "
                "%.2f of its %.2f GiB are free without them",
                wanted / _GIB, container.free / _GIB, container.limit / _GIB,
            )  # fmt: skip
            return wanted
        if is_cache_chosen() and (part := (free_host_memory() or 0) // 2 // ranks):
            logger.warning(
                "the KV cache has %.2f GiB, a part of what is free, and not %.2f: weights and "
                "other processes leave no more",
                part / _GIB, wanted / _GIB,
            )  # fmt: skip
            return part
        raise error if container is None else _with_free(error, container) from error


def _with_free(error: ValueError, container: GroupMemory) -> ValueError:
    """Return the refusal with what is free, as vLLM counts files in memory as used."""
    if not str(error).startswith(_REFUSAL):
        return error
    free = f"{container.free / _GIB:.2f} of {container.limit / _GIB:.2f} GiB"
    return ValueError(f"{error} Without files in memory {free} are free in this container.")
