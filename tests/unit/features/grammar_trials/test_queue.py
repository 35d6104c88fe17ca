"""Trials of grammars: few at once, no source in the way of another, none without who waits."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmi_vllm.features.grammar_trials.child import PASSED, fork_trial, wait_for_verdict
from lmi_vllm.features.grammar_trials.queue import (
    MAX_OF_ONE_SOURCE,
    MAX_SLOW_SOURCES,
    MAX_TRIALS,
    Place,
    SharedTask,
)
from lmi_vllm.features.grammar_trials.queue import FairSemaphore as Places
from lmi_vllm.features.grammar_trials.trials import Trials as GrammarTrials
from lmi_vllm.features.grammar_trials.walks import TriedGrammar

EVIL = "192.0.2.1"


async def settle() -> None:
    """Let every task run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Trials:
    """Trials that last until they are let go, and the order in which they began."""

    def __init__(self) -> None:
        self.places = Places()
        self.began: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def start(self, name: str, source: str) -> "asyncio.Task[None]":
        """Ask for a place for one trial."""
        self.ends[name] = asyncio.Event()
        return asyncio.create_task(self._run(name, source))

    async def _run(self, name: str, source: str) -> None:
        place = Place()
        with self.places.asked_by(place, source):
            await self._hold(name, place)

    async def _hold(self, name: str, place: Place) -> None:
        async with self.places.hold(place):
            self.began.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        """Let a trial end."""
        self.ends[name].set()
        await settle()


@pytest.fixture
def trials() -> Trials:
    """No trial yet."""
    return Trials()


async def test_one_source_cannot_take_every_trial_place(trials: Trials) -> None:
    """However many it asks for; and who has none yet is next."""
    for number in range(16):
        trials.start(f"evil {number}", EVIL)
    await settle()
    assert trials.began == [f"evil {number}" for number in range(MAX_OF_ONE_SOURCE)]
    trials.start("ordinary", "198.51.100.7")
    await settle()
    assert trials.began[-1] == "ordinary"
    trials.start("other", "203.0.113.9")
    trials.start("ordinary again", "198.51.100.7")
    await trials.end("evil 0")
    assert trials.began[-1] == "other"
    await trials.end("ordinary")
    assert trials.began[-1] == "ordinary again"
    assert trials.places.running.total() == MAX_TRIALS


async def test_sources_take_turns(trials: Trials) -> None:
    """One that asks for much waits as long as the others for each."""
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        trials.start(name, name[0])
    await settle()
    assert trials.began == ["a1", "a2", "b1"]
    for ended in ("a1", "a2", "b1", "c1"):
        await trials.end(ended)
    assert trials.began == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_sources_that_are_new_each_time_pass_none_that_waits(trials: Trials) -> None:
    """Addresses that ask once each, one after the other, against one that was served before."""
    for name in ("honest", "new 0", "new 1", "new 2"):
        trials.start(name, name)
    await settle()
    await trials.end("honest")
    trials.start("honest again", "honest")
    for number in range(3, 6):
        trials.start(f"new {number}", f"new {number}")
    await settle()
    await trials.end("new 0")
    assert trials.began[-1] == "honest again"


async def test_source_with_a_recent_trial_waits_behind_the_others(trials: Trials) -> None:
    """Three that ask for much, against one that comes last: it has the first place."""
    for number in range(4):
        for name in ("a", "b", "c"):
            trials.start(f"{name}{number}", name)
    trials.start("honest", "honest")
    await settle()
    assert trials.began == ["a0", "b0", "c0"]
    await trials.end("b0")
    assert trials.began[-1] == "honest"
    for name in ("a0", "c0", "honest"):
        await trials.end(name)
    assert trials.began[4:] == ["b1", "a1", "c1"]


async def test_sources_whose_trials_were_slow_are_behind_all_others() -> None:
    """However many ask for slow ones again and again: a quick one has the next free place.

    Where the order was that of the last trials alone, the honest one waited for 17 of the others.
    """
    trials = Trials()
    trials.places.slow_seconds = 0.02
    evil = [f"evil {number}" for number in range(20)]
    for name in evil:
        trials.start(name, name)
    await settle()
    for _ in evil:  # each has been slow once
        await asyncio.sleep(0.02)
        await trials.end(trials.began[-MAX_TRIALS])
    trials.began.clear()
    again = [trials.start(f"{name} again", name) for name in evil]
    await settle()
    for number in range(3):
        trials.start(f"honest {number}", "honest")
        await settle()
        running = next(name for name in trials.began if name.startswith("evil"))
        trials.began.remove(running)
        await trials.end(running)
        assert trials.began[-1] == f"honest {number}"
        await trials.end(f"honest {number}")
    for task in again:
        task.cancel()
    await settle()


async def test_a_source_is_trusted_again_after_quick_trials(trials: Trials) -> None:
    """What is remembered of it halves with each, and of no more than some sources."""
    for source, seconds in (("a", 8.0), ("b", 0.1), ("a", 0.1), ("a", 0.1), ("a", 0.1)):
        trials.places._charge(source, seconds)
    assert trials.places._slow == {"a": 1.0}
    trials.places._charge("a", 0.1)
    assert not trials.places._slow
    for number in range(MAX_SLOW_SOURCES + 5):
        trials.places._charge(str(number), 2.0)
    assert len(trials.places._slow) == MAX_SLOW_SOURCES


async def test_disconnected_waiter_frees_its_place(trials: Trials) -> None:
    """Waiting or with a place; nothing is remembered of those who have gone."""
    tasks = [trials.start(str(number), EVIL) for number in range(8)]
    await settle()
    for task in tasks[:7]:
        task.cancel()
    await settle()
    assert trials.began == ["0", "1", "7"]
    await trials.end("7")
    assert not trials.places.running
    assert not trials.places._since


async def test_clients_that_go_together_end_without_an_error(trials: Trials) -> None:
    """The place of one is not given to another that is going: its turn cannot be set."""
    tasks = [trials.start(name, name) for name in "abcdef"]
    await settle()
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * len(tasks)
    assert trials.began == ["a", "b", "c"]
    assert not trials.places.running


async def test_trial_of_two_sources_begins_in_the_first_turn_of_either(trials: Trials) -> None:
    """One that has much waiting asked for it first: the other's turn is not put off by that."""
    for number in range(12):
        trials.start(f"evil {number}", EVIL)
    shared = Place()
    with trials.places.asked_by(shared, EVIL):
        trials.ends["shared"] = asyncio.Event()
        task = asyncio.create_task(trials._hold("shared", shared))
        await settle()
        assert "shared" not in trials.began
        with trials.places.asked_by(shared, "honest"):
            await settle()
            assert trials.began[-1] == "shared"
            assert trials.places.running == {EVIL: MAX_OF_ONE_SOURCE, "honest": 1}
    await trials.end("shared")
    await task
    assert trials.places.running == {EVIL: MAX_OF_ONE_SOURCE}


async def test_source_that_has_gone_leaves_its_turn(trials: Trials) -> None:
    """A trial that two asked for waits in the turn of the one that is left."""
    for name in ("a", "b", "c", "d"):
        trials.start(name, name)
    shared = Place()
    with trials.places.asked_by(shared, EVIL):
        with trials.places.asked_by(shared, "honest"):
            trials.ends["shared"] = asyncio.Event()
            task = asyncio.create_task(trials._hold("shared", shared))
            await settle()
            assert trials.began == ["a", "b", "c"]
        for name in ("a", "b"):
            await trials.end(name)
        assert trials.began[3:] == ["d", "shared"]
        assert trials.places.running == {"c": 1, "d": 1, EVIL: 1}
        await trials.end("shared")
        await task
    for name in ("c", "d"):
        await trials.end(name)
    assert not trials.places.running
    assert not trials.places._since


async def test_a_trial_ends_with_the_last_that_waits_for_it() -> None:
    """The others have its result."""
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("yes")
        return ""

    trial = SharedTask(work())
    first, second = (asyncio.create_task(trial.result()) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    assert (ended, trial.is_over) == ([], False)
    second.cancel()
    await settle()
    assert (ended, trial.is_over) == (["yes"], True)


async def test_a_child_ends_where_its_verdict_is_not_waited_for() -> None:
    """Killed and reaped."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        os.execvp("sleep", ["sleep", "60"])
    waiting = asyncio.create_task(wait_for_verdict(pid, readable, 60))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert await comes(lambda: not Path(f"/proc/{pid}").exists())
    os.close(writable)


async def comes(condition: Callable[[], bool]) -> bool:
    """Whether the condition holds within five seconds."""
    for _ in range(500):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


async def test_verdict_needs_none_of_the_threads_of_others() -> None:
    """They may all hold a registration that waits for its source."""
    come_back, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    held = asyncio.create_task(asyncio.to_thread(come_back.wait, 60))
    await asyncio.sleep(0.01)
    try:
        assert await asyncio.wait_for(wait_for_verdict(*fork_trial(lambda: PASSED), 60), 10) == ""
    finally:
        come_back.set()
        await held


def slow_grammar() -> TriedGrammar:
    """Compile for longer than a trial may take."""
    time.sleep(60)
    raise AssertionError


def no_grammar() -> TriedGrammar:
    """Say at once that it is none."""
    raise ValueError("no grammar")


async def test_grammar_that_another_asked_for_waits_in_its_own_turn() -> None:
    """Twelve slow ones of that other are before it in the other's turns alone."""
    trials = GrammarTrials(1.0, ThreadPoolExecutor(1))
    asked = [trials.verdict(f"slow {number}", slow_grammar, 8, EVIL) for number in range(12)]
    asked.append(trials.verdict("shared", no_grammar, 8, EVIL))
    evil = [asyncio.create_task(verdict) for verdict in asked]
    await settle()
    assert "no grammar" in await trials.verdict("shared", no_grammar, 8, "honest")
    assert sum(task.done() for task in evil[:12]) <= 2 * MAX_OF_ONE_SOURCE
    assert "no grammar" in await evil[12]
    for task in evil[:12]:
        task.cancel()
    await asyncio.gather(*evil, return_exceptions=True)
