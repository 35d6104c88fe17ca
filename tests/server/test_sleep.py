"""Scale to zero: an idle model gives its memory back, and the next request wakes it."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.errors import EngineStartError
from lmi_vllm.features.scripted.engine import LENGTH, ScriptedEngine
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import AdapterRef, GenerationChunk, GenerationJob
from lmi_vllm.server.supervisor import RESTART_PAUSE_SECONDS
from tests.server.conftest import PROMPT, Answer, Engines, Serve, Serving, Slow, restarted, until

IDLE = {"LMI_SLEEP_AFTER_SECONDS": "20"}
INPUTS = [{"name": "inputs", "datatype": "BYTES", "shape": [1], "data": ["a b"]}]
WAKING_REQUESTS = {
    "/invocations": PROMPT,
    "/predictions/model": PROMPT,
    "/v1/completions": {"prompt": "one two", "max_tokens": 2},
    "/v2/models/model/infer": {"inputs": INPUTS},
}


async def asleep(serve: Serve, **environ: str) -> Serving:
    """Return a server whose model has fallen asleep, with its memory given back."""
    server = await (await serve(str(DEMO_MODEL_DIR), **{**IDLE, **environ})).ready()
    await server.clock.advance(25)
    assert server.state is State.ASLEEP
    await until(lambda: is_given_back(server.engines.started[-1]))
    return server


def is_given_back(engine: ScriptedEngine) -> bool:
    """Whether the engine has ended, or sleeps."""
    return engine.is_closed or engine.is_asleep


async def waiting(server: Serving, path: str = "/invocations") -> "asyncio.Task[Answer]":
    """Return a request that waits for the model to wake."""
    before = server.in_flight
    request = asyncio.create_task(server.ask("POST", path, WAKING_REQUESTS[path]))
    await until(lambda: server.in_flight == before + 1)
    return request


async def test_idle_model_falls_asleep_and_stays_ready(serve: Serve) -> None:
    """Its engine ends; balancers must go on to send requests, or none would wake it."""
    server = await asleep(serve)
    status, entry = await server.ping()
    assert (status, entry["status"]) == (200, "Asleep")
    assert 0 <= entry["seconds"] <= 5
    for path in ("/ready", "/health", "/live", "/v2/health/ready", "/v2/models/model/ready"):
        assert (await server.ask("GET", path)).status == 200
    metrics = (await server.ask("GET", "/metrics")).body.decode()
    assert 'lmi_state{state="Asleep"} 1.0' in metrics
    assert f"lmi_asleep_seconds {entry['seconds']}" in metrics
    assert [card["id"] for card in (await server.ask("GET", "/v1/models")).json["data"]]


async def test_requests_keep_it_awake_and_probes_of_the_server_do_not(serve: Serve) -> None:
    """The time counts from the last request; LMI_IDLE_PROBE_INTERVAL asks for tokens, too."""
    server = await (await serve(**IDLE, LMI_IDLE_PROBE_INTERVAL="4")).ready()
    await server.clock.advance(15)
    assert await server.infer() == 200
    await server.clock.advance(15)
    assert server.state is State.HEALTHY
    await server.clock.advance(10)
    assert server.state is State.ASLEEP


async def test_running_request_keeps_it_awake(serve: Serve, engines: Engines) -> None:
    """However long it takes: the time begins with its end."""
    engines.script = [slow := Slow()]
    server = await (await serve(**IDLE)).ready()
    request = asyncio.create_task(server.infer())
    await until(lambda: server.in_flight == 1)
    await server.clock.advance(100)
    assert server.state is State.HEALTHY
    slow.rest.set()
    assert await request == 200
    await server.clock.advance(15)
    assert server.state is State.HEALTHY
    await server.clock.advance(10)
    assert server.state is State.ASLEEP


@pytest.mark.parametrize("path", WAKING_REQUESTS)
async def test_request_wakes_it_on_every_route(serve: Serve, engines: Engines, path: str) -> None:
    """It waits, and is answered by the next engine; one that comes meanwhile, too."""
    server = await asleep(serve)
    engines.gate.clear()
    request = await waiting(server, path)
    await server.became(State.WAKING)
    status, entry = await server.ping()
    assert (status, entry["status"], entry["phase"]) == (200, "Waking", "engine")
    second = await waiting(server)
    engines.gate.set()
    assert (await request).status == (await second).status == 200
    assert (len(engines.started), server.state, server.in_flight) == (2, State.HEALTHY, 0)
    metrics = (await server.ask("GET", "/metrics")).body.decode()
    assert "lmi_asleep_seconds 0.0" in metrics


async def test_it_sleeps_again_and_again(serve: Serve, engines: Engines) -> None:
    """Each time the last engine ends and another one answers."""
    server = await asleep(serve)
    for number in range(2, 5):
        assert await server.infer() == 200
        assert len(engines.started) == number
        await server.clock.advance(25)
        assert server.state is State.ASLEEP
        await until(lambda: engines.started[-1].is_closed)


async def test_wait_has_a_bound(serve: Serve, engines: Engines) -> None:
    """LMI_WAKE_TIMEOUT: a clear 503 with Retry-After; the model wakes none the less."""
    server = await asleep(serve, LMI_WAKE_TIMEOUT="30")
    engines.gate.clear()
    request = await waiting(server)
    await server.clock.advance(31)
    refused = await request
    assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
    assert "within 30 s (LMI_WAKE_TIMEOUT)" in refused.body.decode()
    assert server.in_flight == 0
    engines.gate.set()
    await server.became(State.HEALTHY)
    assert await server.infer() == 200


async def test_refusal_says_when_it_will_be_awake(serve: Serve, engines: Engines) -> None:
    """Retry-After is what is left of the time that the last waking took."""
    server = await asleep(serve, LMI_WAKE_TIMEOUT="10")
    engines.gate.clear()
    first = await waiting(server)
    await server.clock.advance(90)
    assert (await first).status == 503
    engines.gate.set()
    await server.became(State.HEALTHY)
    await server.clock.advance(25)
    await until(lambda: engines.started[-1].is_closed)
    engines.gate.clear()
    second = await waiting(server)
    await server.became(State.WAKING)
    await server.clock.advance(11)
    assert 75 <= int((await second).headers["Retry-After"]) <= 85
    engines.gate.set()


async def test_first_refusal_says_it_by_an_earlier_process(serve: Serve, engines: Engines) -> None:
    """What was kept beside compiled code counts until this process has woken one."""
    server = await asleep(serve, LMI_WAKE_TIMEOUT="10")
    server.expect(again_seconds=90)
    engines.gate.clear()
    request = await waiting(server)
    await server.became(State.WAKING)
    assert (await server.ping())[1]["seconds_left"] == 90
    await server.clock.advance(11)
    assert 75 <= int((await request).headers["Retry-After"]) <= 85
    engines.gate.set()


async def test_waiting_requests_fill_the_queue(serve: Serve, engines: Engines) -> None:
    """Those above job_queue_size are refused as ever: they would wait without a bound."""
    server = await asleep(serve, SERVING_JOB_QUEUE_SIZE="1")
    engines.gate.clear()
    first = await waiting(server)
    assert await server.infer() == 503
    engines.gate.set()
    assert (await first).status == 200


async def test_client_that_leaves_while_it_wakes_gives_its_slot_back(
    serve: Serve, engines: Engines
) -> None:
    """The model wakes, and sleeps again."""
    server = await asleep(serve)
    engines.gate.clear()
    request = await waiting(server)
    request.cancel()
    await until(lambda: server.in_flight == 0)
    engines.gate.set()
    await server.became(State.HEALTHY)
    await server.clock.advance(25)
    assert server.state is State.ASLEEP


async def test_engine_that_does_not_wake_is_a_failure(serve: Serve, engines: Engines) -> None:
    """What waits gets an error, and the process ends as after an engine's death."""
    server = await asleep(serve)
    engines.gate.clear()
    engines.script = [EngineStartError("no memory is left")]
    request = await waiting(server)
    engines.gate.set()
    code, reason = await server.ended()
    assert (code, reason) == (1, "no memory is left")
    assert (await request).status == 503


@pytest.mark.parametrize(
    ("environ", "kept"),
    [({}, LENGTH), ({"OPTION_MAX_MODEL_LEN": "64"}, LENGTH), ({"OPTION_MAX_MODEL_LEN": "auto"}, 0)],
    ids=["unset", "a number", "auto"],
)
async def test_engine_after_the_first_keeps_the_length(
    serve: Serve, engines: Engines, environ: dict[str, str], kept: int
) -> None:
    """Of a waking, and of a restart; `auto` asks for what memory allows each time."""
    engines.script = [ScriptedEngine(), ScriptedEngine(max_model_len=LENGTH - 9)]
    server = await (await serve(**IDLE, **environ, SERVING_RETRY_THRESHOLD="1")).ready()
    await server.clock.advance(25)
    assert await server.infer() == 200
    engines.started[-1].die()
    await restarted(server, 3)
    assert engines.served_lengths == [0, kept, kept]


async def test_engine_that_does_not_wake_is_started_again(serve: Serve, engines: Engines) -> None:
    """Within retry_threshold, as after an engine's death."""
    server = await asleep(serve, SERVING_RETRY_THRESHOLD="1")
    engines.gate.clear()
    engines.script = [EngineStartError("no memory is left")]
    request = await waiting(server)
    engines.gate.set()
    await server.became(State.PENDING)
    assert (await request).status == 503
    await server.clock.advance(RESTART_PAUSE_SECONDS)
    await server.became(State.HEALTHY)
    assert await server.infer() == 200


async def test_model_whose_files_are_gone_is_named(serve: Serve, tmp_path: Path) -> None:
    """The path is not taken for a hub's id, as vLLM would."""
    shutil.copytree(DEMO_MODEL_DIR, model := tmp_path / "model")
    server = await (await serve(str(model))).ready()
    assert (await server.ask("POST", "/server/sleep")).status == 200
    model.rename(tmp_path / "gone")
    assert (await server.ask("POST", "/invocations", PROMPT)).status == 503
    code, reason = await server.ended()
    assert (code, f"{model} does not exist any more" in reason) == (1, True)


async def test_drain_while_asleep_wakes_no_engine(serve: Serve, engines: Engines) -> None:
    """Nothing is in flight: the server ends at once."""
    server = await asleep(serve)
    server.stop.set()
    assert await server.ended() == (0, "")
    assert len(engines.started) == 1


async def test_drain_while_waking_refuses_what_waits(serve: Serve, engines: Engines) -> None:
    """It was not admitted yet: another server may answer it; the end waits for no engine."""
    server = await asleep(serve)
    engines.gate.clear()
    request = await waiting(server)
    await server.became(State.WAKING)
    server.stop.set()
    refused = await request
    assert (refused.status, refused.headers["Retry-After"]) == (503, "30")
    assert await server.ended() == (0, "")


async def test_drain_while_waking_refuses_calls_that_wait(serve: Serve, engines: Engines) -> None:
    """A call that changes adapters holds no slot; it must not go on to an engine that has ended."""
    server = await asleep(serve)
    engines.gate.clear()
    call = asyncio.create_task(server.ask("DELETE", "/adapters/json"))
    await server.became(State.WAKING)
    server.stop.set()
    assert (await call).status == 503
    assert await server.ended() == (0, "")


async def test_delay_of_the_shutdown_serves_a_model_that_sleeps(
    serve: Serve, engines: Engines
) -> None:
    """LMI_SHUTDOWN_DELAY: not ready, but requests of balancers that are late wake it."""
    server = await asleep(serve, LMI_SHUTDOWN_DELAY="10")
    server.stop.set()
    await until(lambda: server.is_leaving)
    assert (await server.ping())[0] == 503
    assert await server.infer() == 200
    await server.clock.advance(10)
    assert await server.ended() == (0, "")


async def test_request_of_another_process_calls_the_sleep_off(
    serve: Serve, engines: Engines
) -> None:
    """One admitted it by the state before: it holds a slot, and finds its engine."""
    server = await (await serve(**IDLE)).ready()
    confirmed = server.on_confirm_state(2)
    await server.clock.advance(25)
    await until(lambda: confirmed.count(0) == 1)
    assert (server.state, engines.started[0].is_closed) == (State.HEALTHY, False)
    server.give_back_slots()
    await server.clock.advance(25)
    assert server.state is State.ASLEEP
    await until(lambda: engines.started[0].is_closed)


async def test_adapters_come_back_with_the_engine(serve: Serve, engines: Engines) -> None:
    """Loaded ones are loaded again; a call that registers one wakes the model to check it."""
    server = await asleep(serve)
    source = str(DEMO_MODEL_DIR / "adapters" / "json")
    added = await server.ask("POST", f"/adapters?name=late&src={source}")
    assert added.status == 200
    assert set(engines.started[1].adapters) == {"capitals", "json", "late"}
    await server.clock.advance(25)
    await until(lambda: engines.started[1].is_closed)
    listed = (await server.ask("GET", "/adapters")).json["adapters"]
    assert {row["name"] for row in listed} == {"capitals", "json", "late"}
    assert (await server.ask("DELETE", "/adapters/json")).status == 200
    assert set(engines.started[2].adapters) == {"capitals", "late"}
    asked = await server.ask("POST", "/invocations", {**PROMPT, "adapters": "late"})
    assert asked.status == 200


@dataclass
class SlowLoad(ScriptedEngine):
    """Takes until `loaded` is set to load an adapter."""

    loaded: asyncio.Event = field(default_factory=asyncio.Event)

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Wait for it."""
        if adapter.name == "late":
            await self.loaded.wait()
        await ScriptedEngine.load_adapter(self, adapter)


async def test_call_that_changes_adapters_keeps_it_awake(serve: Serve, engines: Engines) -> None:
    """An engine that ends in the middle of it would lose the change."""
    engines.script = [slow := SlowLoad()]
    server = await (await serve(str(DEMO_MODEL_DIR), **IDLE)).ready()
    source = str(DEMO_MODEL_DIR / "adapters" / "json")
    call = asyncio.create_task(server.ask("POST", f"/adapters?name=late&src={source}"))
    await asyncio.sleep(0.2)
    await server.clock.advance(100)
    assert server.state is State.HEALTHY
    refused = await server.ask("POST", "/server/sleep")
    assert (refused.status, "changes adapters" in refused.body.decode()) == (409, True)
    slow.loaded.set()
    assert (await call).status == 200


async def test_route_puts_to_sleep_and_wakes(serve: Serve, engines: Engines) -> None:
    """Without the option, too; POST answers once the memory is back, DELETE once it is awake."""
    server = await (await serve()).ready()
    await server.clock.advance(1000)
    shown = (await server.ask("GET", "/server/sleep")).json
    assert shown == {
        "status": "Healthy", "seconds": 0.0, "wakes_on_request": False,
        "is_given_back": False, "level": "stop", "last_wake_seconds": 0.0,
    }  # fmt: skip
    slept = await server.ask("POST", "/server/sleep")
    assert (slept.status, slept.json["status"], slept.json["wakes_on_request"]) == (
        200, "Asleep", True,
    )  # fmt: skip
    assert engines.started[0].is_closed
    assert (await server.ask("POST", "/server/sleep")).json["status"] == "Asleep"
    woken = await server.ask("DELETE", "/server/sleep")
    assert (woken.status, woken.json["status"], len(engines.started)) == (200, "Healthy", 2)
    assert (await server.ask("PUT", "/server/sleep")).status == 405


async def test_route_refuses_while_requests_run(serve: Serve, engines: Engines) -> None:
    """Nothing is cut off, and nothing is asked for later."""
    engines.script = [slow := Slow()]
    server = await (await serve()).ready()
    request = asyncio.create_task(server.infer())
    await until(lambda: server.in_flight == 1)
    refused = await server.ask("POST", "/server/sleep")
    assert (refused.status, "1 requests in flight" in refused.body.decode()) == (409, True)
    slow.rest.set()
    assert await request == 200
    await server.clock.advance(100)
    assert server.state is State.HEALTHY


async def test_route_refuses_to_put_a_model_to_sleep_that_wakes(
    serve: Serve, engines: Engines
) -> None:
    """At once: who waits for it is not let down, and the call does not wait for a next sleep."""
    server = await asleep(serve)
    engines.gate.clear()
    request = await waiting(server)
    await server.became(State.WAKING)
    refused = await asyncio.wait_for(server.ask("POST", "/server/sleep"), 10)
    assert (refused.status, "is waking" in refused.body.decode()) == (409, True)
    engines.gate.set()
    assert (await request).status == 200


async def test_route_says_that_a_request_called_the_sleep_off(serve: Serve) -> None:
    """One that another process admitted meanwhile: 409, where 200 would say that it sleeps."""
    server = await (await serve()).ready()
    server.on_confirm_state(2)
    asking = asyncio.create_task(server.ask("POST", "/server/sleep"))
    async with asyncio.timeout(10):
        while not asking.done():  # its first look may come before the end of the last request
            await server.clock.advance(1)
            await asyncio.sleep(0.01)
    refused = await asking
    assert (refused.status, "2 requests in flight" in refused.body.decode()) == (409, True)
    server.give_back_slots()
    assert (await server.ask("POST", "/server/sleep")).json["status"] == "Asleep"


@dataclass
class SlowToEnd(ScriptedEngine):
    """Ends once `ended` is set."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def close(self) -> None:
        """Wait for it."""
        await self.ended.wait()
        await ScriptedEngine.close(self)


async def test_drain_answers_a_call_that_puts_to_sleep(serve: Serve, engines: Engines) -> None:
    """It is not cut off: the model is not asleep, and the next caller learns why."""
    engines.script = [slow := SlowToEnd()]
    server = await (await serve()).ready()
    call = asyncio.create_task(server.ask("POST", "/server/sleep"))
    await server.became(State.ASLEEP)
    server.stop.set()
    refused = await asyncio.wait_for(call, 10)
    assert (refused.status, "shutting down" in refused.body.decode()) == (503, True)
    slow.ended.set()
    assert await server.ended() == (0, "")


async def test_call_of_the_engines_own_sleep_is_not_woken_by_requests(serve: Serve) -> None:
    """Who pauses an engine for new weights wants no answers of it before they are there."""
    server = await (await serve(**IDLE)).ready()
    server.set_asleep(is_asleep=True)
    await server.clock.advance(100)
    assert (await server.ping())[0] == 503
    assert await server.infer() == 503
    server.set_asleep(is_asleep=False)
    assert await server.infer() == 200


async def test_registered_model_sleeps_and_is_unregistered_asleep(
    serve: Serve, engines: Engines
) -> None:
    """POST /models: as any other, and the slot is free afterwards."""
    server = await serve(None, SERVING_LOAD_MODELS="NONE", **IDLE)
    await until(lambda: "without a model" in server.printed())
    path = f"/models?url={DEMO_MODEL_DIR}&model_name=m"
    assert (await server.ask("POST", path)).status == 200
    await server.clock.advance(25)
    await until(lambda: engines.started[0].is_closed)
    (shown,) = (await server.ask("GET", "/models")).json["models"]
    assert shown["status"] == "READY"
    assert (await server.ask("POST", "/predictions/m", PROMPT)).status == 200
    await server.clock.advance(25)
    await until(lambda: engines.started[1].is_closed)
    assert (await server.ask("DELETE", "/models/m")).status == 200
    assert (await server.ask("GET", "/ping")).json == {}
    assert (await server.ask("POST", path)).status == 200


@pytest.fixture
def _gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver's tool name a device."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("level", ["1", "2"])
async def test_levels_of_vllm_keep_the_engine(serve: Serve, engines: Engines, level: str) -> None:
    """Its weights leave the device; level 2 has adapters unloaded before and loaded after it."""
    server = await asleep(serve, LMI_SLEEP_LEVEL=level)
    engine = engines.started[0]
    assert (engine.sleeps, engine.is_closed) == ([int(level)], False)
    assert set(engine.adapters) == ({"capitals", "json"} if level == "1" else set())
    before = {name: ref.engine_id for name, ref in engine.adapters.items()}
    asked = await server.ask("POST", "/invocations", {**PROMPT, "adapters": "json"})
    assert asked.status == 200
    assert (engines.started, engine.is_asleep) == ([engine], False)
    assert set(engine.adapters) == {"capitals", "json"}
    assert all(engine.adapters[name].engine_id == number for name, number in before.items())


@pytest.mark.usefixtures("_gpu")
async def test_engine_that_dies_asleep_is_replaced(serve: Serve, engines: Engines) -> None:
    """Within retry_threshold; the next request finds another one."""
    server = await asleep(serve, LMI_SLEEP_LEVEL="1", SERVING_RETRY_THRESHOLD="1")
    engines.started[0].die()
    await server.became(State.PENDING)
    await server.clock.advance(RESTART_PAUSE_SECONDS)
    await server.became(State.HEALTHY)
    assert await server.infer() == 200
    assert len(engines.started) == 2


@dataclass
class Mute(ScriptedEngine):
    """Gives no token after it has slept."""

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Fail once it has slept."""
        if self.sleeps:
            raise EngineStartError("it answers no more")
        async for chunk in ScriptedEngine.generate(self, job, direct):
            yield chunk


@pytest.mark.usefixtures("_gpu")
async def test_engine_that_wakes_without_a_token_is_replaced(
    serve: Serve, engines: Engines
) -> None:
    """It must prove itself as after a start: a request gets no answer of lost weights."""
    engines.script = [Mute()]
    server = await asleep(serve, LMI_SLEEP_LEVEL="2", SERVING_RETRY_THRESHOLD="1")
    assert await server.infer() == 503
    await server.clock.advance(RESTART_PAUSE_SECONDS)
    await server.became(State.HEALTHY)
    assert engines.started[0].is_closed
    assert await server.infer() == 200
