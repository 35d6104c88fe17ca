"""The trial of a grammar: a forked child compiles and walks it, and its verdict is remembered."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from lmi_vllm.features.grammar_trials.child import PASSED, end_trial, fork_trial, wait_for_verdict
from lmi_vllm.features.grammar_trials.queue import FairSemaphore, Place, SharedTask
from lmi_vllm.features.grammar_trials.walks import TriedGrammar, walk

WALK_TOKENS: Final = 1024  # of an answer that may be so long
MAX_VERDICTS: Final = 4096  # verdicts
SLOW_PART: Final = 10  # of the time that a trial may take makes its source wait behind others

# An exception says what is wrong with the grammar.
CompileGrammar = Callable[[], TriedGrammar]


class Trials:
    """Tries every grammar that is new, for `seconds` at most; `thread` forks the children."""

    def __init__(self, seconds: float, thread: ThreadPoolExecutor) -> None:
        self._seconds = seconds
        self._thread = thread
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, tuple[SharedTask, Place]] = {}
        self._places = FairSemaphore(slow_seconds=seconds / SLOW_PART)

    async def verdict(
        self, grammar: str, compile_grammar: CompileGrammar, max_tokens: int | None, source: str
    ) -> str:
        """Return why the grammar is refused for an answer of that many tokens; empty if it is not.

        Trials of one `source` do not delay those of others, also where they are of the same
        grammar. A trial ends when no caller waits for it.
        """
        # Rounded up, so that few lengths of answers need a try of their own.
        steps = min(1 << (max(max_tokens or WALK_TOKENS, 16) - 1).bit_length(), WALK_TOKENS)
        key = hashlib.sha256(f"{steps} {grammar}".encode("utf-8", "replace")).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            return verdict
        trial, place = self._running.get(key, (None, None))
        if trial is None or place is None or trial.is_over:  # single flight: one child for equals
            attempt, place = partial(_attempt, compile_grammar, steps), Place()
            trial = SharedTask(self._judge(key, attempt, place))
            self._running[key] = trial, place
        try:
            with self._places.asked_by(place, source):
                return await trial.result()
        finally:
            if trial.is_over and self._running.get(key) == (trial, place):
                del self._running[key]

    async def _judge(self, key: bytes, attempt: Callable[[], bytes], place: Place) -> str:
        async with self._places.hold(place):
            verdict = await self._answer(attempt)
        self._verdicts[key] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _answer(self, attempt: Callable[[], bytes]) -> str:
        """Try the grammar in a child, which ends even where the fork is cancelled."""
        loop = asyncio.get_running_loop()
        forking = loop.run_in_executor(self._thread, fork_trial, attempt)
        try:
            pid, pipe = await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(lambda forked: end_trial(*forked.result()))
            raise
        return await wait_for_verdict(pid, pipe, self._seconds)


def _attempt(compile_grammar: CompileGrammar, steps: int) -> bytes:
    """Compile and walk a grammar, in the child."""
    walk(compile_grammar(), steps)
    return PASSED
