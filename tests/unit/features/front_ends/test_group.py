"""When a front-end process that has ended is replaced."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from lmi_vllm.errors import EngineStartError
from lmi_vllm.features.front_ends import group as group_module
from lmi_vllm.features.front_ends import hanging, joining
from lmi_vllm.features.front_ends.channel import JoinEngine, StateChanged
from lmi_vllm.features.front_ends.group import SPARE_CLIENTS, FrontEndGroup
from lmi_vllm.features.front_ends.handle import FrontEnd, ProcessEndedError
from lmi_vllm.features.front_ends.starts import FrontEndStarts
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments, ServingProfile
from tests.server.conftest import until
from tests.support.assembled import load_settings


@dataclass(frozen=True)
class Setup:
    """What a process is run with."""

    row: int = 0


@pytest.mark.parametrize("state", [State.HEALTHY, State.DRAINING])
async def test_process_that_ends_in_a_drain_is_not_replaced(
    state: State, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one would import vLLM for longer than the drain lasts."""
    caplog.set_level(logging.ERROR)
    started: list[str] = []

    async def run(_: Setup) -> None:
        """End at once."""

    def start_missing() -> tuple[()]:
        started.append("another")
        return ()

    process = SimpleNamespace(run=run, row=1, pid=7, ending="signal 9")
    row = SimpleNamespace(clear=lambda: None)
    group = SimpleNamespace(
        _setup=Setup(),
        _processes=[process],
        _clients=SimpleNamespace(counters=SimpleNamespace(row=lambda _: row), is_exhausted=False),
        _first=SimpleNamespace(state=lambda: SimpleNamespace(state=state)),
        _start_missing=start_missing,
        _joining=SimpleNamespace(join_late=None),  # nothing was started
    )
    await FrontEndGroup._run(cast("Any", group), cast("Any", process))
    assert started == (["another"] if state is State.HEALTHY else [])
    assert "front-end process 7 ended with signal 9" in caplog.text


class Beside:
    """A process that joins at once, or dies of it where its row is in `dying`."""

    dying: ClassVar[set[int]] = set()
    imports: ClassVar[bool] = True  # at once

    def __init__(self, _first: object, row: int, _start: object) -> None:
        self.row = self.pid = row
        self.ending, self.is_asked, self.is_routed = "signal 9", False, False
        self.joins = 0
        self.imported, self.joined, self.is_serving, self.over = (asyncio.Event() for _ in "abcd")
        if self.imports:
            self.imported.set()
        self.channel = SimpleNamespace(send=self.send)

    async def run(self, _: object) -> None:
        """Run until it dies."""
        await self.over.wait()

    async def wait_for(self, event: asyncio.Event) -> None:
        """Wait as the real one does."""
        ends = [asyncio.create_task(one.wait()) for one in (event, self.over)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if not event.is_set():
            raise ProcessEndedError(self.ending)

    async def join(self, message: JoinEngine) -> None:
        """Ask as the real one does."""
        self.is_asked = True
        self.channel.send(message)
        await self.wait_for(self.joined)

    async def detach(self) -> None:
        """Leave the engine."""
        self.is_asked = self.is_routed = False
        self.joined.clear()
        self.is_serving.clear()

    def send(self, message: object) -> None:
        """Join, or die."""
        if isinstance(message, JoinEngine):
            self.joins += 1
            (self.over if self.row in self.dying else self.joined).set()

    async def send_adapters(self, *_: object) -> None:
        """Take them."""

    def end_hanging(self) -> None:
        """End as the real one does."""
        self.over.set()


def new_group(monkeypatch: pytest.MonkeyPatch, dying: set[int]) -> FrontEndGroup:
    """Return a group of three whose others have been started."""
    monkeypatch.setattr(group_module, "FrontEnd", Beside)
    monkeypatch.setattr(FrontEndStarts, "begin", lambda _: None)
    monkeypatch.setattr(Beside, "dying", dying)
    group = FrontEndGroup(3, InferenceService(RequestQueue(Lifecycle())), {})
    group.begin(load_settings({"HF_MODEL_ID": "a/b"}), EngineArguments({}))
    group.new_clients()
    return group


def join(group: FrontEndGroup, wait_until_dead: Callable[[], Awaitable[Any]]) -> Awaitable[None]:
    """Let the others join an engine."""
    engine = SimpleNamespace(
        complete=lambda client: client, arguments=EngineArguments({}), shared_adapters=(),
        task="x", wait_until_dead=wait_until_dead,
    )  # fmt: skip
    return group.join(cast("Any", engine), ServingProfile(model_name="demo"), cast("Any", ()))


@pytest.mark.parametrize("dying", [set(), {1}, {1, 2, 3}, {1, 2, 3, 4}])
async def test_process_that_dies_while_it_joins_is_replaced(
    dying: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times; then the start fails, and says how the last one ended."""
    group = new_group(monkeypatch, dying)
    joining = join(group, asyncio.Event().wait)
    async with asyncio.timeout(10):
        if len(dying) > SPARE_CLIENTS:
            with pytest.raises(EngineStartError, match="did not start: signal 9"):
                await joining
        else:
            await joining
            rows = [one.row for one in group._processes]
            assert rows == sorted({1, 2, 3, 4, 5} - dying)[:2]
    group.remove()


async def test_first_start_waits_for_a_process_that_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asked for three processes has three when the server is ready."""
    monkeypatch.setattr(Beside, "imports", False)
    group = new_group(monkeypatch, set())
    joining = asyncio.ensure_future(join(group, asyncio.Event().wait))
    first, second = cast("list[Beside]", group._processes)
    first.imported.set()
    await until(first.is_serving.is_set)
    assert not joining.done()
    second.imported.set()
    async with asyncio.timeout(10):
        await joining
    group.remove()


@pytest.mark.parametrize("limit", ["IMPORT_SECONDS", "FIRST_JOIN_SECONDS"])
async def test_process_that_hangs_at_the_start_is_replaced(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports only from its first engine on, so its import and its joining have limits."""
    monkeypatch.setattr(joining, limit, 0.05)
    group = new_group(monkeypatch, set())
    stuck = cast("Beside", group._processes[0])
    if limit == "IMPORT_SECONDS":
        stuck.imported.clear()
    else:
        stuck.channel = SimpleNamespace(send=lambda _: None)
    async with asyncio.timeout(10):
        await join(group, asyncio.Event().wait)
    assert stuck.over.is_set()
    assert [one.row for one in group._processes] == [2, 3]
    group.remove()


async def test_engine_that_dies_while_they_join_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process waits for the answer of an engine that is not there any more."""
    monkeypatch.setattr(Beside, "send", lambda _, __: None)

    async def die() -> str:
        return "the engine process died"

    group = new_group(monkeypatch, set())
    async with asyncio.timeout(10):
        with pytest.raises(EngineStartError, match="the engine process died"):
            await join(group, die)
    group.remove()


@pytest.mark.parametrize("has_joined", [False, True], ids=["at the start", "asleep"])
async def test_process_that_ends_without_an_engine_is_replaced_at_once(
    has_joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports vLLM while the engine starts, or the model sleeps, and joins the next engine."""
    group = new_group(monkeypatch, set())
    if has_joined:
        await join(group, asyncio.Event().wait)
        await group.detach()
    ended = cast("Beside", group._processes[0])
    ended.over.set()
    await until(lambda: ended not in [*group._processes] and len(group._processes) == 2)
    kept, new = cast("list[Beside]", group._processes)
    assert not new.is_asked
    if has_joined:
        group.begin(load_settings({"HF_MODEL_ID": "a/b"}), EngineArguments({}))
        group.new_clients()
    async with asyncio.timeout(10):
        await join(group, asyncio.Event().wait)
    assert group._processes == [kept, new]
    assert (kept.joins, new.joins) == (1 + has_joined, 1)
    group.remove()


async def test_process_that_imports_as_a_later_engine_comes_joins_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests wait for a model that wakes, and other processes answer them meanwhile."""
    caplog.set_level(logging.INFO)
    group = new_group(monkeypatch, set())
    await join(group, asyncio.Event().wait)
    await group.detach()
    monkeypatch.setattr(Beside, "imports", False)
    cast("Beside", group._processes[0]).over.set()
    await until(lambda: not cast("Beside", group._processes[-1]).imported.is_set())
    new = cast("Beside", group._processes[-1])
    group.begin(load_settings({"HF_MODEL_ID": "a/b"}), EngineArguments({}))
    group.new_clients()
    async with asyncio.timeout(10):
        await join(group, asyncio.Event().wait)
    assert cast("Beside", group._processes[0]).is_serving.is_set()
    assert not new.is_asked
    assert caplog.messages[-1].startswith("2 of 3 front-end processes answer at")
    new.imported.set()
    await until(new.is_serving.is_set)
    assert new.joins == 1
    assert re.fullmatch(r"3 front-end processes answer at \S+", caplog.messages[-1])
    group.remove()


async def test_rows_of_ended_processes_are_free_while_there_is_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ended beside the last engine leaves the next processes as many places."""
    group = new_group(monkeypatch, set())
    await join(group, asyncio.Event().wait)

    async def end_one() -> None:
        ended = cast("Beside", group._processes[0])
        ended.over.set()
        await until(lambda: ended not in [*group._processes])

    for _ in range(SPARE_CLIENTS):
        await end_one()
    await group.detach()
    for _ in range(SPARE_CLIENTS):
        await end_one()
        assert len(group._processes) == 2
    await end_one()  # one that ends again and again is not started for ever
    assert len(group._processes) == 1
    group.begin(load_settings({"HF_MODEL_ID": "a/b"}), EngineArguments({}))
    assert len(group._processes) == 2
    assert not group.failed.is_set()
    group.remove()


@pytest.mark.parametrize(
    ("state", "silent_seconds", "is_ended"),
    [
        ((True, True, True), 16.0, True),
        ((True, True, True), 14.0, False),
        ((True, False, False), 16.0, True),  # the model sleeps
        ((True, False, True), 29.0, False),  # it joins the engine of a model that wakes
        ((True, False, True), 31.0, True),
        ((False, False, False), 16.0, False),  # it imports
    ],
)
async def test_process_that_hangs_is_ended_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    state: tuple[bool, bool, bool],
    silent_seconds: float,
    is_ended: bool,
) -> None:
    """Also one that hangs while there is no engine: a waking would wait for it."""
    monkeypatch.setattr(hanging, "WATCH_SECONDS", 0.001)
    has_served, is_serving, is_asked = state
    serving, kills = asyncio.Event(), []
    if is_serving:
        serving.set()
    process = SimpleNamespace(
        row=1, pid=7, has_served=has_served, is_serving=serving, is_asked=is_asked,
        kill=lambda: kills.append(7), _is_killed=False,
    )  # fmt: skip
    process.end_hanging = partial(FrontEnd.end_hanging, cast("Any", process))
    counters = SimpleNamespace(row=lambda _: SimpleNamespace(silent_seconds=silent_seconds))
    watching = hanging.end_hanging(cast("Any", [process]), cast("Any", counters))
    task = asyncio.create_task(watching)
    await asyncio.sleep(0.05)
    task.cancel()
    assert kills == ([7] if is_ended else [])
    assert caplog.text.count("hangs") == int(is_ended)


async def test_processes_that_were_stopped_with_the_server_do_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`docker pause`: each may report before it is judged; one that still does not is ended."""
    monkeypatch.setattr(hanging, "WATCH_SECONDS", 0.001)
    times: Iterator[float] = iter([0.0, 1.0, 19.0, *range(23, 52, 4)])
    now = [0.0]

    def monotonic() -> float:
        now[0] = next(times)  # at its end the watch ends
        return now[0]

    monkeypatch.setattr(hanging, "time", SimpleNamespace(monotonic=monotonic))
    serving, ended = asyncio.Event(), []
    serving.set()
    process = SimpleNamespace(
        row=1, has_served=True, is_serving=serving, is_asked=True,
        end_hanging=lambda: ended.append(now[0]),
    )  # fmt: skip

    def row(_: int) -> SimpleNamespace:
        return SimpleNamespace(silent_seconds=now[0] - 0.6)

    watching = hanging.end_hanging(cast("Any", [process]), cast("Any", SimpleNamespace(row=row)))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await watching
    assert ended == [51]


async def woken_without_one(
    monkeypatch: pytest.MonkeyPatch, told: list[object]
) -> tuple[FrontEndGroup, Beside]:
    """Return a group over a second engine, and the process of it that does not answer yet."""
    monkeypatch.setattr(joining, "LATER_JOIN_SECONDS", 0.05)
    group = new_group(monkeypatch, set())
    await join(group, asyncio.Event().wait)
    await group.detach()
    stuck = cast("Beside", group._processes[0])
    stuck.channel = SimpleNamespace(send=told.append)
    group.begin(load_settings({"HF_MODEL_ID": "a/b"}), EngineArguments({}))
    group.new_clients()
    async with asyncio.timeout(10):
        await join(group, asyncio.Event().wait)
    return group, stuck


async def test_waking_waits_for_a_hanging_process_within_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others answer; once it goes on, the log counts again, and not if it ends."""
    caplog.set_level(logging.INFO)
    group, stuck = await woken_without_one(monkeypatch, [])
    assert not stuck.is_serving.is_set()
    assert caplog.messages[-1].startswith("2 of 3 front-end processes answer at")
    stuck.joined.set()
    await until(lambda: caplog.messages[-1].startswith("3 front-end processes answer at"))
    group.remove()
    group, stuck = await woken_without_one(monkeypatch, [])
    stuck.over.set()
    await until(lambda: caplog.messages[-1].startswith("3 front-end processes answer at"))
    assert not any(text.startswith("1 of 3") for text in caplog.messages)
    group.remove()


async def test_process_that_joins_late_admits_nothing_before_it_has_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It forwards requests until it is told of a ready model, with the adapters of the engine."""
    told: list[object] = []
    group, stuck = await woken_without_one(monkeypatch, told)

    async def take_adapters(*_: object) -> None:
        told.append("adapters")

    monkeypatch.setattr(stuck, "send_adapters", take_adapters)
    monkeypatch.setattr(stuck, "send", told.append)
    told.clear()
    lifecycle = group._service.lifecycle
    lifecycle.set_state(State.HEALTHY)
    assert told == []
    stuck.joined.set()
    await until(stuck.is_serving.is_set)
    lifecycle.set_state(State.ASLEEP)
    states = [one.state if isinstance(one, StateChanged) else one for one in told]
    assert states == ["adapters", State.HEALTHY, State.ASLEEP]
    group.remove()


async def test_process_that_begins_over_a_dead_engine_joins_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for an answer for ever, and be taken for one that hangs."""
    group = new_group(monkeypatch, set())
    await join(group, asyncio.Event().wait)
    group.engine_died()
    ended = cast("Beside", group._processes[0])
    ended.over.set()
    await until(lambda: ended not in [*group._processes] and len(group._processes) == 2)
    new = cast("Beside", group._processes[-1])
    await asyncio.sleep(0.05)
    assert not new.is_asked
    await group.detach()
    group.begin(load_settings({"HF_MODEL_ID": "a/b"}), EngineArguments({}))
    group.new_clients()
    async with asyncio.timeout(10):
        await join(group, asyncio.Event().wait)
    assert new.joins == 1
    group.remove()
