"""Grammars in the engine: each compiled by its own library, and ended where it becomes slow.

vLLM chooses one of four libraries for each request, but compiles with that of the engine's first.
After a schema that only Outlines takes, no other request could have an object or a grammar. With
xgrammar first, what only another library knows was ignored. Here the engine keeps a library for
each. A grammar that a step spends too long on ends its request: a trial cannot reach every state.
Nor does it find every dead end, where neither a token nor the end may come. vLLM samples there
nonetheless, and the grammar rejects what it gets: 500 without a reason. So it is where the other
fields of a request exclude all that the grammar allows, and where the library refuses what vLLM's
check let pass. Here the request's end says why, and the server makes it the client's error.

Upstream: https://github.com/vllm-project/vllm/issues/54003 (slow grammars). The libraries are not
    reported that we know of.
Releases: 0.31 and later.
Shows: after `patternProperties` beside `multipleOf` every `json_object` is 500. A token of one
    request takes over a second, and all others wait. `root ::= "a" root` with nothing to end it
    in a rare branch is "Internal server error". So is `allowed_token_ids` of other letters than
    those of the regular expression.
May go: when test_plain_vllm_compiles_grammars_with_the_library_of_the_first fails, and
    tests/contract/test_hostile_grammars.py holds without it.
"""

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from lmi_vllm.engine.base import GRAMMAR_FAULT
from lmi_vllm.engine.vllm.names import StructuredOutputManager
from lmi_vllm.features.grammar_trials.queue import FairExecutor

# Processor time of a step's grammars in the engine; above it the slow ones end.
SLOWEST_MASK_SECONDS: Final = 0.1
SLOW_GRAMMAR: Final = (
    f"{GRAMMAR_FAULT}is too ambiguous or too deeply repeated: a token of this answer took too long"
)
DEAD_GRAMMAR: Final = (
    f"{GRAMMAR_FAULT}has a dead end: after the text so far neither more nor the end may come"
)
UNCOMPILED: Final = f"{GRAMMAR_FAULT}does not compile: "
# Fields of a request that exclude tokens altogether; a bias only makes them rare.
EXCLUDING: Final = ("allowed_token_ids", "bad_words")


class EveryBackend(StructuredOutputManager):  # type: ignore[misc,unused-ignore]
    """vLLM's manager of grammars with a library for each kind of request, not the first for all."""

    backend: Any
    backends: dict[str, Any]
    dead: set[str]  # requests that come to a dead end with the draft of a step

    def grammar_init(self, request: Any) -> None:
        """As vLLM's, with the request's own library, also for the thread that compiles it."""
        if request.structured_output_request is None:
            return
        outputs = request.structured_output_request.params
        ours: Any = copy.copy(self)
        ours.backend = self.backends.get(outputs._backend)
        StructuredOutputManager.grammar_init(ours, request)  # makes one where there is none
        self.backend = self.backends[outputs._backend] = ours.backend

    def accept_tokens(self, request: Any, new_token_ids: list[int]) -> bool:
        """As vLLM's; a request that had no token left says why at its end."""
        is_accepted = bool(super().accept_tokens(request, new_token_ids))
        if is_accepted:
            return True
        fields = [name for name in EXCLUDING if getattr(request.sampling_params, name, None)]
        if request.request_id in self.dead:
            request.stop_reason = DEAD_GRAMMAR
        elif fields:
            request.stop_reason = _nothing_left(fields)
        return False


def keep_every_backend(manager: Any) -> None:
    """Make an engine's manager, which has had no request yet, one that keeps every library.

    Its threads serve one client after the other.
    """
    manager.backends, manager.dead = {}, set()
    if hasattr(manager, "executor"):  # not without a tokenizer
        manager.executor = FairExecutor(manager.executor)
    manager.__class__ = EveryBackend


class GrammarWatch:
    """Times the grammars of a scheduler's steps, and sees dead ends; see `EngineGrammars`."""

    def __init__(self, scheduler: Any) -> None:
        self._manager: Any = scheduler.structured_output_manager
        keep_every_backend(self._manager)
        self._scheduler = scheduler
        self._faults: dict[str, str] = {}  # of requests that are to end

    def bitmask(self, compute: Callable[[Any], Any], scheduled: Any) -> Any:
        """Return what vLLM computes; if that is too slow, each of its grammars is timed alone."""
        began = time.thread_time()
        masks = compute(scheduled)
        if masks is None:
            return None
        if time.thread_time() - began > SLOWEST_MASK_SECONDS:
            slow = filter(self._is_slow, masks.structured_output_request_ids)
            self._faults |= dict.fromkeys(slow, SLOW_GRAMMAR)
        if not (is_alive := masks.grammar_bitmask.any(axis=1)).all():
            self._note_dead_ends(masks, is_alive, scheduled.scheduled_spec_decode_tokens)
        return masks

    def faulty(self, running: Collection[str]) -> dict[str, str]:
        """Return the requests that are to end, and why: running ones, and those never compiled."""
        ended = {name: self._faults.pop(name) for name in running if name in self._faults}
        if self._scheduler.grammar_compile_error_reqs:
            ended |= self._uncompiled()
        if self._faults or self._manager.dead:  # of those that were aborted
            known = self._scheduler.requests.keys()
            self._faults = {name: self._faults[name] for name in self._faults.keys() & known}
            self._manager.dead &= known
        return ended

    def _uncompiled(self) -> dict[str, str]:
        """Take over the requests that vLLM would end without a reason."""
        names = set(self._scheduler.grammar_compile_error_reqs) & self._scheduler.requests.keys()
        self._scheduler.grammar_compile_error_reqs.clear()
        requests = [self._scheduler.requests[name] for name in names]
        return {
            one.request_id: f"{UNCOMPILED}{one.structured_output_request.grammar}"
            for one in requests
        }

    def _note_dead_ends(
        self, masks: Any, is_alive: Sequence[bool], drafts: Mapping[str, Sequence[int]]
    ) -> None:
        """A request has a row for each token of its draft, and one more."""
        first = 0
        for name in masks.structured_output_request_ids:
            last = first + len(drafts.get(name, ()))
            if not is_alive[first]:
                self._faults.setdefault(name, DEAD_GRAMMAR)
            elif not all(is_alive[first : last + 1]):  # if the model takes the draft
                self._manager.dead.add(name)
            first = last + 1

    def _is_slow(self, name: str) -> bool:
        wanted = self._scheduler.requests[name].structured_output_request
        if wanted is None or wanted.grammar is None or wanted.grammar.is_terminated():
            return False
        row = self._manager.backend.allocate_token_bitmask(1)
        began = time.thread_time()
        wanted.grammar.fill_bitmask(row, 0)
        return time.thread_time() - began > SLOWEST_MASK_SECONDS


def _nothing_left(fields: Sequence[str]) -> str:
    return (
        f"{GRAMMAR_FAULT}leaves no token: what may come after the text so far is excluded by "
        f"{' and '.join(fields)}"
    )
