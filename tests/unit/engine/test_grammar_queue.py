"""Trials of grammars: few at once, no source in the way of another, none without who waits."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lmi_vllm.engine.vllm.workarounds.grammar_queue import AT_ONCE, OF_ONE_SOURCE, SharedTask
from lmi_vllm.engine.vllm.workarounds.grammar_queue import FairPlaces as Places

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
        async with self.places.hold(source):
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


async def test_one_source_leaves_a_place_for_another(trials: Trials) -> None:
    """However many it asks for; and who has none yet is next."""
    for number in range(16):
        trials.start(f"evil {number}", EVIL)
    await settle()
    assert trials.began == [f"evil {number}" for number in range(OF_ONE_SOURCE)]
    trials.start("honest", "198.51.100.7")
    await settle()
    assert trials.began[-1] == "honest"
    trials.start("other", "203.0.113.9")
    trials.start("honest again", "198.51.100.7")
    await trials.end("evil 0")
    assert trials.began[-1] == "other"
    await trials.end("honest")
    assert trials.began[-1] == "honest again"
    assert trials.places.running.total() == AT_ONCE


async def test_sources_take_turns(trials: Trials) -> None:
    """One that asks for much waits as long as the others for each."""
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        trials.start(name, name[0])
    await settle()
    assert trials.began == ["a1", "a2", "b1"]
    for ended in ("a1", "a2", "b1", "c1"):
        await trials.end(ended)
    assert trials.began == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_who_leaves_takes_no_place(trials: Trials) -> None:
    """Waiting or with a place; nothing is remembered of those who have gone."""
    tasks = [trials.start(str(number), EVIL) for number in range(8)]
    await settle()
    for task in tasks[:7]:
        task.cancel()
    await settle()
    assert trials.began == ["0", "1", "7"]
    await trials.end("7")
    assert not trials.places.running
    assert not trials.places._served


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
    pytest.importorskip("xgrammar", reason="comes with vLLM: make setup installs it")
    from lmi_vllm.engine.vllm.workarounds.grammar_trials import (  # noqa: PLC0415 (as above)
        wait_for_verdict,
    )

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
