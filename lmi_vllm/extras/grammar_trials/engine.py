"""Grammars in the engine: each compiled by its own library, and ended where it becomes slow.

vLLM chooses one of four libraries for each request, but compiles with that of the engine's first.
After a schema that only Outlines takes, no other request could have an object or a grammar. With
xgrammar first, what only another library knows was ignored. Here the engine keeps a library for
each. A grammar that a step spends too long on ends its request: a trial cannot reach every state.

Upstream: https://github.com/vllm-project/vllm/issues/54003 (slow grammars). The libraries are not
    reported that we know of.
Releases: 0.31 and later.
Shows: after `patternProperties` beside `multipleOf` every `json_object` is 500. A token of one
    request takes over a second, and all others wait.
May go: when test_plain_vllm_compiles_grammars_with_the_library_of_the_first fails, and
    tests/contract/test_hostile_grammars.py holds without it.
"""

import copy
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from lmi_vllm.engine.vllm.names import StructuredOutputManager
from lmi_vllm.extras.grammar_trials.queue import FairExecutor

# Processor time of a step's grammars in the engine; above it the slow ones end.
SLOWEST_MASK_SECONDS: Final = 0.1
SLOW_GRAMMAR: Final = (
    "the schema, regular expression or grammar is too ambiguous or too deeply repeated: a token of "
    "this answer took too long"
)


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
    if hasattr(manager, "executor"):  # not without a tokenizer
        manager.executor = FairExecutor(manager.executor)
    manager.__class__ = EveryBackend


class GrammarWatch:
    """Times the grammars of a scheduler's steps; see `EngineGrammars`."""

    def __init__(self, scheduler: Any) -> None:
        keep_every_backend(scheduler.structured_output_manager)
        self._scheduler = scheduler
        self._slow: set[str] = set()  # requests whose grammar cost too much

    def bitmask(self, compute: Callable[[Any], Any], scheduled: Any) -> Any:
        """Return what vLLM computes; if that is too slow, each of its grammars is timed alone."""
        began = time.thread_time()
        masks = compute(scheduled)
        if masks is not None and time.thread_time() - began > SLOWEST_MASK_SECONDS:
            self._slow.update(filter(self._is_slow, masks.structured_output_request_ids))
        return masks

    def slow(self, running: Collection[str]) -> dict[str, str]:
        """Return the running requests that are to end, and why."""
        slow, self._slow = self._slow & set(running), set()
        return dict.fromkeys(slow, SLOW_GRAMMAR)

    def _is_slow(self, name: str) -> bool:
        wanted = self._scheduler.requests[name].structured_output_request
        if wanted is None or wanted.grammar is None or wanted.grammar.is_terminated():
            return False
        row = self._scheduler.structured_output_manager.backend.allocate_token_bitmask(1)
        began = time.thread_time()
        wanted.grammar.fill_bitmask(row, 0)
        return time.thread_time() - began > SLOWEST_MASK_SECONDS
