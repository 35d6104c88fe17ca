"""vLLM's schedulers with the workarounds for their defects, as `cpu.worker` is for workers.

`scheduler_cls` names them, vLLM's own way to replace the scheduler; an operator's own is joined
with ours. They end requests whose numbers are not finite, forget their blocks and have blocks
cleared (`not_finite` describes all three). They also end requests whose grammar becomes slow in the
engine or comes to a dead end, as the feature grammar_trials says. Events of the KV cache leave with
the names of adapters that requests use: routers compare them with `model` (DECISIONS.md 116).

Upstream: https://github.com/vllm-project/vllm/pull/50283 (numbers), issues/54003 (grammars).
Releases: 0.31 and later.
Shows: see `not_finite`, and `features/grammar_trials/engine.py`.
May go: with both; test_plain_vllm_corrupts_every_later_answer is of the first.
"""

import logging
from collections import defaultdict
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus

from lmi_vllm.engine.vllm.engine_calls import requested_name
from lmi_vllm.engine.vllm.names import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    current_platform,
)
from lmi_vllm.engine.vllm.processes import process_parts
from lmi_vllm.engine.vllm.workarounds import CPU_WORKER, joined_class
from lmi_vllm.engine.vllm.workarounds.not_finite import REASON, mark_not_finite

logger = logging.getLogger(__name__)


class _ClearedBlocks(KVCacheConfig):  # type: ignore[misc,unused-ignore]
    """vLLM's description of a KV cache whose blocks are cleared before a request gets them."""

    needs_kv_cache_zeroing = True


def with_requested_names(batch: Any) -> Any:
    """Return a batch of events of the KV cache with the names of adapters that requests use.

    The hashes of blocks stay those of the loads: two loads of one name never share a block.
    """
    for event in batch.events:
        if name := getattr(event, "lora_name", None):
            event.lora_name = shown = requested_name(name)
            event.extra_keys = event.extra_keys and [
                keys and tuple(shown if key == name else key for key in keys)
                for keys in event.extra_keys
            ]
    return batch


class EndsHarmfulRequests:
    """A mixin for vLLM's schedulers that ends harmful requests."""

    vllm_config: Any
    requests: dict[str, Any]
    kv_cache_manager: Any
    structured_output_manager: Any
    kv_event_publisher: Any

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *more: Any, **named: Any) -> None:
        if current_platform.is_cpu() and not vllm_config.use_v2_model_runner:
            cleared = _ClearedBlocks.__new__(_ClearedBlocks)
            cleared.__dict__ = vars(kv_cache_config)
            kv_cache_config = cleared
        # By name, as vLLM calls it: an operator's scheduler may take no other arguments.
        named |= {"vllm_config": vllm_config, "kv_cache_config": kv_cache_config}
        super().__init__(*more, **named)
        self._grammars = process_parts().watch_grammars(self)
        publish = self.kv_event_publisher.publish
        self.kv_event_publisher.publish = lambda batch: publish(with_requested_names(batch))

    def get_grammar_bitmask(self, scheduled: Any) -> Any:
        """As vLLM's, watched by the feature that tries grammars."""
        compute = super().get_grammar_bitmask  # type: ignore[misc]
        return self._grammars.bitmask(compute, scheduled)

    def update_from_output(self, scheduled: Any, computed: Any) -> dict[int, Any]:
        """As vLLM's; ends requests whose numbers are not finite, or whose grammar is at fault."""
        corrupted = self._corrupted(computed)
        if not_finite := mark_not_finite(computed, self.requests):
            self._forget_blocks(not_finite)
        faulty = self._grammars.faulty(computed.req_id_to_index)
        if not corrupted and not faulty:
            done: dict[int, Any] = super().update_from_output(scheduled, computed)  # type: ignore[misc]
            return done
        self._forget_blocks(corrupted)
        for name in (*corrupted, *faulty):  # without a token vLLM gives it no output
            if name in computed.req_id_to_index:
                computed.sampled_token_ids[computed.req_id_to_index[name]] = []
        done = super().update_from_output(scheduled, computed)  # type: ignore[misc]
        self._end(faulty | dict.fromkeys(corrupted, REASON), corrupted, done)
        return done

    def _corrupted(self, computed: Any) -> dict[str, int]:
        """Return the requests whose logits are not finite, and how many."""
        counts = computed.num_nans_in_logits
        if not counts or not any(counts.values()) or not self._has_a_row_for_each:
            return {}
        return {name: count for name, count in counts.items() if count and name in self.requests}

    @cached_property
    def _has_a_row_for_each(self) -> bool:
        """Whether vLLM's count of NaN has a row for each request (speculative decoding)."""
        config = self.vllm_config
        is_ours = config.parallel_config.worker_cls == CPU_WORKER and not config.use_v2_model_runner
        return is_ours or not config.speculative_config

    def _forget_blocks(self, corrupted: Collection[str]) -> None:
        """Remove these blocks from the prefix cache."""
        for name in corrupted:
            for blocks in self.kv_cache_manager.get_block_ids(name):
                self.kv_cache_manager.evict_blocks({block for block in blocks if block})

    def _end(
        self, reasons: dict[str, str], corrupted: dict[str, int], done: dict[int, Any]
    ) -> None:
        last: dict[int, list[Any]] = defaultdict(list)
        ended = self.finish_requests(reasons, RequestStatus.FINISHED_ERROR)  # type: ignore[attr-defined]
        for request in ended:
            last[request.client_index].append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    stop_reason=reasons[request.request_id],
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                    num_nans_in_logits=corrupted.get(request.request_id, 0),
                )
            )
        for client, outputs in last.items():
            done.setdefault(client, EngineCoreOutputs()).outputs.extend(outputs)


if not TYPE_CHECKING:  # else every name would count as one of this module

    def __getattr__(name: str) -> type:
        """Return the guard joined with an operator's scheduler; vLLM's engine calls this."""
        joined = joined_class(EndsHarmfulRequests, name)
        other = joined.__bases__[-1]
        if issubclass(other, Scheduler):
            return joined
        logger.warning(
            "scheduler_cls=%s.%s is no subclass of vLLM's Scheduler: a request whose numbers are "
            "not finite, or whose grammar is slow, does not end with an error, and may spoil or "
            "delay the answers of others",
            other.__module__,
            other.__qualname__,
        )
        return other


class GuardedScheduler(EndsHarmfulRequests, Scheduler):  # type: ignore[misc,unused-ignore]
    """vLLM's scheduler, which ends requests that harm others."""


class GuardedAsyncScheduler(EndsHarmfulRequests, AsyncScheduler):  # type: ignore[misc,unused-ignore]
    """vLLM's scheduler that is a step ahead, which ends requests that harm others."""
