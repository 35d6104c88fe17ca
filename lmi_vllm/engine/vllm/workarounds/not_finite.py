"""Requests whose logits are not finite, and what they leave behind in the KV cache.

The token of such logits is the first of the vocabulary or the end token. Keys and values that are
not finite stay in freed blocks. The attention kernel of the CPU multiplies what lies behind the end
of a sequence in its last block by zero, and zero times NaN is NaN. The kernels of GPUs leave that
out.

Here vLLM's own count (`VLLM_COMPUTE_NANS_IN_LOGITS`) is acted upon: such a request ends with an
error, and no later one finds its blocks by their prefix. On a CPU every block is cleared before a
request gets it, by the way that vLLM has for Mamba (`cpu.worker` has the other half): a request
that its client ends in the very step that makes it so is not seen here any more. Vectors and scores
of pooling models are counted here, vLLM counts logits only: such a vector becomes one NaN in
the engine, and `async_llm` refuses that. vLLM counts NaN alone, after the masks of grammars: a row
with +Inf, or of nothing but -Inf, would answer anything, with 200. With speculative decoding a
request has several rows, and vLLM takes each for a request. So `cpu.worker` counts what the model
gave; with any other worker it is vLLM's count, and with speculative decoding none.

The scheduler is replaced (by `scheduler`) with `scheduler_cls`, vLLM's own way, on every
platform; an operator's own is joined with ours. This module imports neither vLLM nor torch.

Upstream: https://github.com/vllm-project/vllm/pull/50283.
Releases: 0.31 and later.
Shows: an empty answer with 200; on a CPU so do all that get its blocks, until the engine restarts.
May go: when test_plain_vllm_corrupts_every_later_answer fails.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from lmi_vllm.engine.vllm.workarounds import BESIDE, joined_name

logger = logging.getLogger(__name__)

NOT_FINITE_COUNT: Final = "VLLM_COMPUTE_NANS_IN_LOGITS"
REASON: Final = "the model's numbers for this request are not finite (NaN or infinite)"
GUARD: Final = "EndsHarmfulRequests"
_VLLM: Final = "vllm."
_SCHEDULERS: Final = "lmi_vllm.engine.vllm.workarounds.scheduler"


def end_not_finite(config: Any) -> None:
    """Let the engine of this configuration end such requests; join an existing scheduler."""
    scheduler = config.scheduler_config
    other = scheduler.scheduler_cls
    if other is None:
        name = "GuardedAsyncScheduler" if scheduler.async_scheduling else "GuardedScheduler"
        scheduler.scheduler_cls = f"{_SCHEDULERS}.{name}"
        return
    other = other if isinstance(other, str) else f"{other.__module__}.{other.__qualname__}"
    if other.startswith(_VLLM):  # vLLM's scheduler of diffusion models, whose steps were not tried
        logger.warning("%s: a request whose numbers are not finite ends without an error", other)
        return
    scheduler.scheduler_cls = joined_name(f"{_SCHEDULERS}.{GUARD}", other)


def is_expected(record: logging.LogRecord) -> bool:
    """Whether to keep a line of vLLM's log, which warns of every scheduler but its own."""
    name = str(record.args)
    return _SCHEDULERS not in name or BESIDE in name


def mark_not_finite(computed: Any, known: Collection[str]) -> list[str]:
    """Replace each vector or score that is not finite by one NaN; return their requests.

    vLLM ends these requests like all others, and passes on the count that is set here.
    """
    outputs: list[Any] = computed.pooler_output or []
    indexes: Mapping[str, int] = computed.req_id_to_index if outputs else {}
    not_finite = [
        name for name, index in indexes.items() if name in known and _is_not_finite(outputs[index])
    ]
    for name in not_finite:
        outputs[indexes[name]] = outputs[indexes[name]].new_full((1,), float("nan"))
    if not_finite:
        computed.num_nans_in_logits = dict.fromkeys(not_finite, 1)
    return not_finite


def _is_not_finite(values: Any) -> bool:
    """Whether a tensor has a number that is not finite; a finite sum means no."""
    return not (values is None or values.sum().isfinite() or values.isfinite().all())


def is_marked_not_finite(values: Any) -> bool:
    """Whether a pooled output was replaced by `mark_not_finite`."""
    return values.numel() == 1 and bool(values.isnan().all())


def requests_not_finite(
    requests: Sequence[str], drafts: Mapping[str, Sequence[int]], logits: Any
) -> list[str]:
    """Return the requests with a useless row of logits: its largest number is not finite.

    NaN counts as the largest, and a model may rule out some tokens with -Inf. A request has a row
    for each token of its draft, and one more; otherwise rows cannot be assigned to requests.
    """
    lengths = [1 + len(drafts.get(name, ())) for name in requests]
    is_useful = logits.amax(dim=-1).isfinite()
    if sum(lengths) != len(logits) or is_useful.all():
        return []
    parts = zip(requests, is_useful.split(lengths), strict=True)
    return [name for name, part in parts if not part.all()]
