"""Requests that would stall the engine, get a wrong answer, or reach into the server's network.

Media. vLLM checks neither the addresses that a host resolves to nor the targets of redirects, and
tries three times with growing time limits (vllm/connections.py). Its connector gets the fetch
of the extra media_urls by its own registry, and fetches nothing without it.

Conversations of the Responses API. vLLM tries an invalid item as each of some sixty kinds, and
collects all errors of all items on the event loop: a body of 2 MB blocks it for minutes. So vLLM's
own model reads a long list a few items at a time, up to the first invalid one.

Batches of chats. With `stream` vLLM answers each of them with its last tokens only, as 200. Its
documentation says that `stream` must be false or absent, and its code does not check it.

Grammars. The extra grammar_trials tries each before the engine compiles it; without it none is
taken. vLLM chooses one of four libraries for each, but compiles with that of the engine's first
request. After a schema that only Outlines takes, no other request could have an object or a
grammar. With xgrammar first, what only another library knows was ignored. Here the engine keeps a
library for each.

Schedulers. Ours end requests whose numbers are not finite (`not_finite`), or whose grammar becomes
slow in the engine.

Upstream: https://github.com/vllm-project/vllm/issues/57157 (media), 54003 (slow grammars). The
    libraries are not reported that we know of.
Releases: 0.31 and later.
Shows: a URL is fetched from inside the network. A body of 2 MB of wrong items blocks the event loop
    for minutes. A batch of chats with `stream` is 200 with the ends of the answers. A token of one
    request takes over a second, and all others wait. After `patternProperties` beside `multipleOf`
    every `json_object` is 500.
May go: when test_media_guard.py, test_hostile_grammars.py and the conversations and batches of
    test_bridge.py of tests/contract hold without it.
"""

import asyncio
import copy
import json
import logging
import time
from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm.envs as vllm_settings
from vllm.connections import HTTPConnection
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmi_vllm.engine.base import CheckGrammar, FetchMedia, MediaRefusedError
from lmi_vllm.engine.vllm.names import (
    EngineCoreOutput,
    EngineCoreOutputs,
    VLLMValidationError,
    current_platform,
)
from lmi_vllm.engine.vllm.workarounds import CPU_WORKER, joined_class
from lmi_vllm.engine.vllm.workarounds.decoded_media import MediaBudget, load_within
from lmi_vllm.engine.vllm.workarounds.not_finite import REASON, mark_not_finite
from lmi_vllm.errors import RequestError
from lmi_vllm.extension import extension
from lmi_vllm.messages import HttpCall, MediaPolicy

logger = logging.getLogger(__name__)

_RESPONSES: Final = "/v1/responses"
_BATCH: Final = "/v1/chat/completions/batch"
_ITEMS_AT_ONCE: Final = 64  # wrong ones: 0.03 s
_UNREAD: Final = (AttributeError, LookupError, RecursionError, TypeError)  # of vLLM's validators
# Processor time of a step's grammars in the engine; above it the slow ones end.
SLOWEST_MASK_SECONDS: Final = 0.1
_UNTRIED: Final = (
    "a schema, regular expression or grammar needs the extra grammar_trials, which is not "
    "installed; LMI_GRAMMAR_TIMEOUT=0 serves it untried"
)
SLOW_GRAMMAR: Final = (
    "the schema, regular expression or grammar is too ambiguous or too deeply repeated: a token of "
    "this answer took too long"
)


async def _fetch_none(*_: object, **__: object) -> bytes:
    """Refuse every URL: the extra that fetches them is not installed."""
    raise MediaRefusedError("media URLs need the extra media_urls, which is not installed")


class GuardedConnection(HTTPConnection):
    """Fetches media within a policy; the rest of vLLM's class is not used."""

    def __init__(self, fetch: FetchMedia, policy: MediaPolicy, domains: tuple[str, ...]) -> None:
        super().__init__()
        self._fetch = fetch
        self._policy = policy
        self._domains = domains

    async def async_get_bytes(
        self,
        url: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's signature; the longest silence
        allow_redirects: bool = True,
        max_bytes: int | None = None,
        request_budget: Any = None,  # from vLLM 0.33: what all media of a request may weigh
    ) -> bytes:
        """Return the bytes at `url`.

        Raises:
            VLLMValidationError: they may not, or cannot, be fetched: the request's fault.
        """
        try:
            content = await self._fetch(
                url,
                self._policy,
                self._domains,
                silence_seconds=timeout,
                max_bytes=max_bytes,
                follows_redirects=allow_redirects,
            )
        except MediaRefusedError as error:
            raise VLLMValidationError(str(error), parameter="url") from error
        if request_budget is not None:
            request_budget.charge(len(content))
        return content

    def get_bytes(self, url: str, **options: Any) -> bytes:
        """Return the same for a caller without an event loop, or inside a running one."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self.async_get_bytes(url, **options)).result()


def guard_media(policy: MediaPolicy) -> None:
    """Make vLLM's handlers load media within `policy`; a user's own connector stays."""
    make = extension(lambda extra: extra.media)
    fetch = _fetch_none if make is None else make()

    class GuardedConnector(MediaConnector):
        """What vLLM's request parsing makes for each request with media."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            domains = tuple(self.allowed_media_domains)
            self.connection = GuardedConnection(fetch, policy, domains)
            self._budget = MediaBudget(policy, vllm_settings.VLLM_MAX_AUDIO_DECODE_BYTES)

        def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
            """As vLLM's, within the budget."""
            return super().load_from_url(url, self._budget.bound(media_io), **options)

        async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
            """As vLLM's, within the budget."""
            return await super().load_from_url_async(url, self._budget.bound(media_io), **options)

    MEDIA_CONNECTOR_REGISTRY.register("http")(GuardedConnector)
    if getattr(torch.load, "func", None) is not load_within:
        torch.load = partial(load_within, torch.load)


async def check_body(call: HttpCall) -> None:
    """Check a body that the application would read for minutes, or answer wrongly.

    Raises:
        RequestError: an item of a conversation is none, or a batch of chats is to be streamed.
    """
    if call.method != "POST" or call.path not in {_RESPONSES, _BATCH}:
        return
    try:
        payload = json.loads(call.body)
        items, streams = payload.get("input"), payload.get("stream")
    except (ValueError, AttributeError, RecursionError):
        return  # the application says so
    if call.path == _RESPONSES and isinstance(items, list) and len(items) > _ITEMS_AT_ONCE:
        await _check_items(items)
    elif call.path == _BATCH and streams:
        raise RequestError("stream: a batch of chats is not streamed; allowed: false")


async def _check_items(items: list[object]) -> None:
    from vllm.entrypoints.openai.responses.protocol import (  # noqa: PLC0415 - not in the engine
        ResponsesRequest,
    )

    for first in range(0, len(items), _ITEMS_AT_ONCE):
        some = items[first : first + _ITEMS_AT_ONCE]
        try:
            ResponsesRequest.model_validate({"input": some})
        except (ValueError, *_UNREAD) as error:  # of pydantic, and of validators
            last = first + len(some)
            raise RequestError(
                f"input: one of the items {first + 1} to {last} is none of the Responses API"
            ) from error
        await asyncio.sleep(0)


async def refuse_untried(*_: object) -> None:
    """Refuse every grammar: the extra that tries them is not installed."""
    raise VLLMValidationError(_UNTRIED)


def grammar_check(llm: Any, seconds: float, thread: ThreadPoolExecutor) -> CheckGrammar | None:
    """Return what tries a grammar before the engine gets it; None if LMI_GRAMMAR_TIMEOUT is 0."""
    if not seconds:
        return None
    make = extension(lambda extra: extra.grammar_trials)
    return refuse_untried if make is None else make(llm, seconds, thread)


class EveryBackend(StructuredOutputManager):  # type: ignore[misc,unused-ignore]
    """vLLM's manager of grammars with a library for each kind of request, not the first for all."""

    backend: Any
    backends: dict[str, Any]

    def grammar_init(self, request: Any) -> None:
        """As vLLM's, with the request's own library, also for the thread that compiles it."""
        if request.structured_output_request is None:
            return
        outputs = request.structured_output_request.params
        ours: Any = copy.copy(self)
        ours.backend = self.backends.get(outputs._backend)
        StructuredOutputManager.grammar_init(ours, request)  # makes one where there is none
        self.backend = self.backends[outputs._backend] = ours.backend


def keep_every_backend(manager: Any) -> None:
    """Make an engine's manager, which has had no request yet, one that keeps every library.

    Its threads serve one client after the other.
    """
    manager.backends = {}
    make = extension(lambda extra: extra.grammar_executor)
    if make is not None and hasattr(manager, "executor"):  # not without a tokenizer
        manager.executor = make(manager.executor)
    manager.__class__ = EveryBackend


class _ClearedBlocks(KVCacheConfig):  # type: ignore[misc,unused-ignore]
    """vLLM's description of a KV cache whose blocks are cleared before a request gets them."""

    needs_kv_cache_zeroing = True


class EndsHarmfulRequests:
    """A mixin for vLLM's schedulers that ends harmful requests."""

    vllm_config: Any
    requests: dict[str, Any]
    kv_cache_manager: Any
    structured_output_manager: Any

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *more: Any, **named: Any) -> None:
        if current_platform.is_cpu() and not vllm_config.use_v2_model_runner:
            cleared = _ClearedBlocks.__new__(_ClearedBlocks)
            cleared.__dict__ = vars(kv_cache_config)
            kv_cache_config = cleared
        # By name, as vLLM calls it: an operator's scheduler may take no other arguments.
        named |= {"vllm_config": vllm_config, "kv_cache_config": kv_cache_config}
        super().__init__(*more, **named)
        keep_every_backend(self.structured_output_manager)
        self._slow: set[str] = set()  # requests whose grammar cost too much

    def get_grammar_bitmask(self, scheduled: Any) -> Any:
        """As vLLM's; if a step is too slow, each of its grammars is timed alone."""
        began = time.thread_time()
        masks = super().get_grammar_bitmask(scheduled)  # type: ignore[misc]
        if masks is not None and time.thread_time() - began > SLOWEST_MASK_SECONDS:
            self._slow.update(filter(self._is_slow, masks.structured_output_request_ids))
        return masks

    def _is_slow(self, name: str) -> bool:
        wanted = self.requests[name].structured_output_request
        if wanted is None or wanted.grammar is None or wanted.grammar.is_terminated():
            return False
        row = self.structured_output_manager.backend.allocate_token_bitmask(1)
        began = time.thread_time()
        wanted.grammar.fill_bitmask(row, 0)
        return time.thread_time() - began > SLOWEST_MASK_SECONDS

    def update_from_output(self, scheduled: Any, computed: Any) -> dict[int, Any]:
        """As vLLM's; ends requests with NaN or infinite logits, or a slow grammar."""
        corrupted = self._corrupted(computed)
        if not_finite := mark_not_finite(computed, self.requests):
            self._forget_blocks(not_finite)
        slow, self._slow = self._slow & set(computed.req_id_to_index), set()
        if not corrupted and not slow:
            done: dict[int, Any] = super().update_from_output(scheduled, computed)  # type: ignore[misc]
            return done
        self._forget_blocks(corrupted)
        for name in (*corrupted, *slow):  # without a token vLLM gives it no output
            computed.sampled_token_ids[computed.req_id_to_index[name]] = []
        done = super().update_from_output(scheduled, computed)  # type: ignore[misc]
        self._end(dict.fromkeys(slow, 0) | corrupted, done)
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

    def _end(self, corrupted: dict[str, int], done: dict[int, Any]) -> None:
        last: dict[int, list[Any]] = defaultdict(list)
        ended = self.finish_requests(corrupted, RequestStatus.FINISHED_ERROR)  # type: ignore[attr-defined]
        for request in ended:
            last[request.client_index].append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    stop_reason=REASON if corrupted[request.request_id] else SLOW_GRAMMAR,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                    num_nans_in_logits=corrupted[request.request_id],
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
