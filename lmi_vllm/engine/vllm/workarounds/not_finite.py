"""Requests whose logits are not finite, and what they leave behind in the KV cache.

Defect: the token of logits that are not finite is the first of the vocabulary or the end token, and
the answer is empty, with 200. Keys and values that are not finite stay in freed blocks. The
attention kernel of the CPU multiplies what lies behind the end of a sequence in its last block by
zero, and zero times NaN is NaN: who gets such a block next answers nothing either, and so on, until
the engine is started again. The kernels of GPUs leave out what lies behind the end.
Releases: all that we support.
Here: vLLM's own count (`VLLM_COMPUTE_NANS_IN_LOGITS`) is acted upon: such a request ends with an
error, and no later one finds its blocks by their prefix. On a CPU every block is cleared before a
request gets it, by the way that vLLM has for Mamba (`cpu_worker` has the other half): a request
that its client ends in the very step that spoils it is not seen here any more. With speculative
decoding nothing is counted: a request has several rows then, and vLLM's count takes each for one.
May go: when vLLM ends such requests, and `tests/contract/test_not_finite.py` holds without it.

The scheduler is replaced (in `hostile_requests`) by `scheduler_cls`, vLLM's own way, on every
platform. This module imports no vLLM.
"""

import logging
from typing import Any, Final

logger = logging.getLogger(__name__)

NOT_FINITE_COUNT: Final = "VLLM_COMPUTE_NANS_IN_LOGITS"
REASON: Final = "the model's numbers for this request are not finite (NaN)"
_SCHEDULERS: Final = "lmi_vllm.engine.vllm.workarounds.hostile_requests"


def end_not_finite(config: Any) -> None:
    """Have the engine of this configuration end such requests, unless its scheduler is replaced."""
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is not None:
        logger.warning(
            "scheduler_cls=%s: requests whose numbers are not finite do not end with an error",
            scheduler.scheduler_cls,
        )
        return
    name = "GuardedAsyncScheduler" if scheduler.async_scheduling else "GuardedScheduler"
    scheduler.scheduler_cls = f"{_SCHEDULERS}.{name}"


def is_expected(record: logging.LogRecord) -> bool:
    """Whether a line of vLLM's is worth writing: it warns of every scheduler but its own."""
    return _SCHEDULERS not in str(record.args)
