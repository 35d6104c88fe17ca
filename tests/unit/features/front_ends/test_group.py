"""When a front-end process that has ended is replaced."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from lmi_vllm.errors import EngineStartError
from lmi_vllm.features.front_ends import group as group_module
from lmi_vllm.features.front_ends.channel import JoinEngine
from lmi_vllm.features.front_ends.group import SPARE_CLIENTS, FrontEndGroup
from lmi_vllm.features.front_ends.handle import ProcessEndedError
from lmi_vllm.features.front_ends.starts import FrontEndStarts
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments, ServingProfile
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
        _join_message=object(),
        _clients=SimpleNamespace(counters=SimpleNamespace(row=lambda _: row), is_exhausted=False),
        _first=SimpleNamespace(state=lambda: SimpleNamespace(state=state)),
        _start_missing=start_missing,
        _join_or_end=None,  # nothing was started
    )
    await FrontEndGroup._run(cast("Any", group), cast("Any", process))
    assert started == (["another"] if state is State.HEALTHY else [])
    assert "front-end process 7 ended with signal 9" in caplog.text


class Beside:
    """A process that joins at once, or dies of it where its row is in `dying`."""

    dying: ClassVar[set[int]] = set()

    def __init__(self, _first: object, row: int, _start: object) -> None:
        self.row = self.pid = row
        self.ending, self.is_routed = "signal 9", False
        self.imported, self.joined, self.is_serving, self._over = (asyncio.Event() for _ in "abcd")
        self.imported.set()
        self.channel = SimpleNamespace(send=self.send)

    async def run(self, _: object) -> None:
        """Run until it dies."""
        await self._over.wait()

    async def wait_for(self, event: asyncio.Event) -> None:
        """Wait as the real one does."""
        ends = [asyncio.create_task(one.wait()) for one in (event, self._over)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if not event.is_set():
            raise ProcessEndedError(self.ending)

    def send(self, message: object) -> None:
        """Join, or die."""
        if isinstance(message, JoinEngine):
            (self._over if self.row in self.dying else self.joined).set()

    async def send_adapters(self, *_: object) -> None:
        """Take them."""


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
