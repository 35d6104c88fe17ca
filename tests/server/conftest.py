"""A whole server inside the test: scripted engines, a clock that the test moves, real HTTP."""

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from lmi_vllm.clock import Clock
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.features.scripted.engine import ScriptedEngine, ScriptedFactory
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.start_progress import Phase
from lmi_vllm.messages import EngineArguments
from lmi_vllm.server.server import Server
from lmi_vllm.server.supervisor import RESTART_PAUSE_SECONDS
from tests.support.assembled import ASSEMBLED, load_settings

REAL_SECONDS = 10.0  # of waiting for what needs no time of the test's clock
WARM_UP_JOBS = 2  # with which a start proves its engine
PROMPT = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}


class ManualClock(Clock):
    """Stands still but for `advance`."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._numbers = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the time that has been advanced."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Return once the test has advanced so far."""
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._numbers), sleeper))
        await sleeper

    async def advance(self, seconds: float) -> None:
        """Let that much time pass; what wakes up on the way runs before the rest of it passes."""
        await settle()
        end = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, sleeper = heapq.heappop(self._sleepers)
            if not sleeper.done():
                sleeper.set_result(None)
                await settle()
        self._now = end
        await settle()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + REAL_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


@dataclass
class Slow(ScriptedEngine):
    """Proves at once that it works; later jobs take until `rest` is set."""

    seconds_per_token: float = 1.0
    rest: asyncio.Event = field(default_factory=asyncio.Event)

    async def _sleep(self, seconds: float) -> None:
        if len(self.jobs) > WARM_UP_JOBS:
            resting, dead = asyncio.create_task(self.rest.wait()), self.wait_until_dead()
            dying = asyncio.create_task(dead)
            try:
                await asyncio.wait({resting, dying}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                resting.cancel()
                dying.cancel()
            await self.check_health()


@dataclass
class Engines(ScriptedFactory):
    """Starts the engines of a script, then ordinary ones; an error in it is a failed start."""

    script: list[ScriptedEngine | Exception] = field(default_factory=list)
    started: list[ScriptedEngine] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    is_abandoned: bool = False
    served_lengths: list[int] = field(default_factory=list)  # that each start was asked to keep

    def __post_init__(self) -> None:
        self.gate.set()
        super().__init__(self._next)

    async def start(self, arguments: EngineArguments, *_: object, **__: object) -> ScriptedEngine:
        """Return the next engine, once the gate is open."""
        self.served_lengths.append(arguments.served_length)
        await self.gate.wait()
        return self._next()

    def abandon(self) -> None:
        """Remember that a start was given up."""
        self.is_abandoned = True

    def _next(self) -> ScriptedEngine:
        step = self.script.pop(0) if self.script else ScriptedEngine()
        if isinstance(step, Exception):
            raise step
        self.started.append(step)
        return step


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    json: Any


class Serving:
    """A server that runs in this loop, and the test's hands on it."""

    def __init__(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        self.engines = engines
        self.clock = ManualClock()
        self.stop = asyncio.Event()
        self.exports: dict[str, str] = {}
        self._capsys = capsys
        self._printed = ""
        self._server: Server
        self._run: asyncio.Task[tuple[int, str]]
        self._session: aiohttp.ClientSession

    async def begin(self, environ: dict[str, str], typed: CommandLine) -> None:
        """Start it; returns when the port answers."""
        settings = load_settings(environ, typed)
        assert not settings.errors
        self._server = Server(
            ASSEMBLED, settings, typed, environ, self.engines, self.exports, self.clock
        )
        self._session = aiohttp.ClientSession()
        self._run = asyncio.create_task(self._server.run(self.stop))
        await until(lambda: self._run.done() or "Listening on " in self.printed())

    def printed(self) -> str:
        """Return what it has written to stdout so far."""
        self._printed += self._capsys.readouterr().out
        return self._printed

    async def ready(self) -> "Serving":
        """Return when it says that it is ready."""
        await until(lambda: "Ready on " in self.printed())
        return self

    async def reached(self, phase: Phase) -> None:
        """Return when its start is in that phase."""
        await until(lambda: self._server.service.lifecycle.start.phase is phase)

    @property
    def state(self) -> State:
        """What it says it is."""
        return self._server.service.lifecycle.state

    @property
    def is_leaving(self) -> bool:
        """Whether it tells balancers that its end has begun."""
        return "shutting_down" in self._server.service.lifecycle.ping_details

    def expect(self, again_seconds: float) -> None:
        """Have it know how long an earlier process took to start its engine again."""
        self._server.service.lifecycle.start.expect(0, again_seconds)

    def set_asleep(self, *, is_asleep: bool) -> None:
        """Have its engine sleep, or wake."""
        self._server.service.lifecycle.set_asleep(is_asleep=is_asleep)

    def on_confirm_state(self, slots: int) -> list[int]:
        """Let another process take slots when it is first asked whether it follows the state.

        Returns a list that gets a 0 each time.
        """
        queue = self._server.service.queue
        asked: list[int] = []

        async def confirm() -> None:
            if not asked:
                queue._slots.add(slots)
            asked.append(0)

        self._server._processes.confirm_state = confirm  # type: ignore[method-assign]
        return asked

    def give_back_slots(self) -> None:
        """Have the other process end its requests."""
        queue = self._server.service.queue
        queue._slots.add(-queue.in_flight)

    def on_drained(self, end: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Have it await that after its last request."""
        model = self._server._models._start.model  # type: ignore[union-attr]
        model.on_drained.append(end)

    async def became(self, state: State) -> None:
        """Return when it is in that state."""
        await until(lambda: self.state is state)

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.printed().partition("Listening on ")[2].split()[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of its base model."""
        return self._server.service.profile.served_names

    @property
    def in_flight(self) -> int:
        """Requests in its queue."""
        return self._server.service.queue.in_flight

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._run.done()

    async def ask(self, method: str, path: str, body: object = None) -> Answer:
        """Send a request."""
        async with self._session.request(method, self.url + path, json=body) as found:
            text = await found.read()
            is_json = found.content_type == "application/json"
            return Answer(
                found.status, dict(found.headers), text, await found.json() if is_json else None
            )

    async def ping(self) -> tuple[int, Any]:
        """Return the status of `/ping` and what it says of the one model."""
        answer = await self.ask("GET", "/ping")
        return answer.status, next(iter(answer.json.values()), None)

    async def infer(self) -> int:
        """Return the status of an ordinary request."""
        return (await self.ask("POST", "/invocations", PROMPT)).status

    async def ended(self) -> tuple[int, str]:
        """Return its exit code and reason."""
        return await asyncio.wait_for(asyncio.shield(self._run), REAL_SECONDS)

    async def close(self) -> None:
        """End it, if the test has not."""
        self.stop.set()
        while not self.is_over:
            await self.clock.advance(1)
            self.stop.set()
            await asyncio.sleep(0.005)
        await self._session.close()


Serve = Callable[..., Awaitable[Serving]]


@pytest.fixture
def engines() -> Engines:
    """The engines that the server of the test gets."""
    return Engines()


@pytest.fixture
async def serve(engines: Engines, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Serve]:
    """Return what starts a server with variables of the environment; its port answers then."""
    made: list[Serving] = []

    async def start(
        model: str | None = "some/model", port: int | None = 0, **environ: str
    ) -> Serving:
        serving = Serving(engines, capsys)
        environ = {"HF_HUB_OFFLINE": "1", **environ}  # whose config.json nothing is asked for
        await serving.begin(environ, CommandLine(port=port, model=model))
        made.append(serving)
        return serving

    yield start
    for serving in made:
        await serving.close()


async def restarted(server: Serving, number: int) -> None:
    """Return when engine `number`, counted from 1, serves after a pause of the test's clock."""
    await server.became(State.PENDING)
    await server.clock.advance(RESTART_PAUSE_SECONDS)
    await until(lambda: len(server.engines.started) == number)
    await server.became(State.HEALTHY)
