"""Files in a container's memory, which vLLM's CPU worker takes for used memory.

In a container with a limit it subtracts all that the control group has in memory from the limit,
weights included that it has read a moment before. It refuses to start, though the kernel would drop
them for a process that asks for memory. On a machine without a limit it counts them as free. So the
worker asks here, where vLLM would refuse. vLLM lets the KV cache take all that is left, too: one
that the server has chosen is made smaller here.

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
# Of the widest layer's width, that a step has in memory for each of its tokens: 7 were measured,
# with what torch and its threads keep after the first step.
_NUMBERS_OF_A_TOKEN: Final = 7
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
    determine: Callable[[], int], given: int | None, share: int, ranks: int = 1, step: int = 0
) -> int:
    """Return the size of the KV cache by vLLM's `determine`, or one that has room.

    Args:
        determine: vLLM's own way, which raises ValueError.
        given: bytes that the cache shall have, if they are given.
        share: bytes that the worker shall take with all that it has.
        ranks: workers that have a cache each in this memory.
        step: bytes that the largest step of a worker takes for a moment (`step_bytes`).
    """
    refusal = None
    try:
        wanted = determine()
    except ValueError as error:
        if not str(error).startswith(_REFUSAL):
            raise
        refusal = error
        wanted = share - psutil.Process().memory_info().rss if given is None else given
    container, free = container_memory(), (free_host_memory() or 0) // ranks
    if is_cache_chosen() and free:
        return _part(wanted, free, step)
    if refusal is None:
        return wanted
    if container is None or not 0 < wanted <= container.free:
        raise refusal if container is None else _with_free(refusal, container) from refusal
    logger.info(
        "the KV cache of %.2f GiB takes the place of files in this container's memory: "
        "%.2f of its %.2f GiB are free without them",
        wanted / _GIB, container.free / _GIB, container.limit / _GIB,
    )  # fmt: skip
    return wanted


def step_bytes(config: Any) -> int:
    """Return about what a worker's largest step takes for a moment, by vLLM's configuration."""
    text = config.model_config.hf_text_config
    widths = (getattr(text, name, None) for name in ("intermediate_size", "hidden_size"))
    width = max((one for one in widths if isinstance(one, int)), default=0)
    width //= config.parallel_config.tensor_parallel_size
    tokens: int = config.scheduler_config.max_num_batched_tokens
    size: int = config.model_config.dtype.itemsize
    return tokens * width * size * _NUMBERS_OF_A_TOKEN


def _part(wanted: int, free: int, step: int) -> int:
    """Return the size that the server has chosen, or the part that it may have of what is free.

    The operator has not asked for it. Half of what a step leaves is for requests, and for whatever
    else grows. A quarter of all is the cache's where a step would leave less.
    """
    most = max((free - step) // 2, free // 4)
    if wanted <= most:
        return wanted
    logger.warning(
        "the KV cache has %.2f GiB, a part of what is free (%.2f), and not %.2f: weights and other "
        "processes leave no more",
        most / _GIB, free / _GIB, wanted / _GIB,
    )  # fmt: skip
    return most


def _with_free(error: ValueError, container: GroupMemory) -> ValueError:
    """Return the refusal with what is free, as vLLM counts files in memory as used."""
    if not str(error).startswith(_REFUSAL):
        return error
    free = f"{container.free / _GIB:.2f} of {container.limit / _GIB:.2f} GiB"
    return ValueError(f"{error} Without files in memory {free} are free in this container.")
