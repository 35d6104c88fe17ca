from collections.abc import Callable

import pytest

from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.start_progress import Phase
from lmi_vllm.web.request import Routes, WebOptions
from tests.conftest import ServeScripted
from tests.web.conftest import lifecycle_of

READINESS = ("/ping", "/ready", "/v1/health/ready")  # the last is what charts for NIM probe
HEALTH_PATHS = (*READINESS, "/health")
LISTENERS = {"one": Routes.ALL, "main": Routes.INFERENCE, "management": Routes.MANAGEMENT}
METHODS = {"GET": 200, "HEAD": 200, "POST": 200, "PUT": 405, "DELETE": 405, "OPTIONS": 405}


@pytest.mark.parametrize("path", HEALTH_PATHS)
@pytest.mark.parametrize(("method", "status"), METHODS.items(), ids=METHODS)
async def test_health_methods(serve: ServeScripted, path: str, method: str, status: int) -> None:
    """Platforms ask in several ways; all other methods are refused."""
    response = await (await serve()).request(method, path)
    assert response.status == status


ANSWERS = {
    State.HEALTHY: (200, b'{"demo":{"status":"Healthy"}}\n'),
    State.ASLEEP: (503, b'{"demo":{"status":"Asleep"}}\n'),
    State.FAILED: (503, b'{"demo":{"status":"FAILED"}}\n'),
    State.DRAINING: (503, b'{"demo":{"status":"DRAINING"}}\n'),
}


@pytest.mark.parametrize("path", HEALTH_PATHS)
@pytest.mark.parametrize(("state", "answer"), ANSWERS.items(), ids=str)
async def test_health_in_each_state(
    serve: ServeScripted, path: str, state: State, answer: tuple[int, bytes]
) -> None:
    """The readiness paths say the same, byte for byte; /health does, too, where that is asked."""
    client = await serve(options=WebOptions(is_health_liveness=False))
    lifecycle_of(client).set_state(state)
    response = await client.get(path)
    assert (response.status, await response.read()) == answer


@pytest.mark.parametrize("phase", Phase, ids=str)
async def test_health_while_starting(serve: ServeScripted, phase: Phase) -> None:
    """Before the first token /ping is 503 with the phase; liveness is 200 all along."""
    client = await serve(is_ready=False)
    lifecycle_of(client).start.enter(phase)
    response = await client.get("/ping")
    entry = (await response.json())["demo"]
    assert response.status == 503
    assert (entry["status"], entry["phase"]) == ("PENDING", str(phase))
    assert (await client.get("/live")).status == 200


async def test_health_without_model(serve: ServeScripted) -> None:
    """A server without a model is well, and says so with an empty object."""
    client = await serve(is_ready=False)
    lifecycle_of(client).remove_model()
    response = await client.get("/ping")
    assert (response.status, await response.read()) == (200, b"{}\n")


def _restart(lifecycle: Lifecycle) -> None:
    lifecycle.set_state(State.HEALTHY)
    lifecycle.begin_restart()


def _fail_openly(lifecycle: Lifecycle) -> None:
    lifecycle.expect_model("demo", hides_failure=True)
    lifecycle.set_state(State.FAILED)


def _register(lifecycle: Lifecycle) -> None:
    lifecycle.remove_model()
    lifecycle.begin_registered()


def _reach(state: State) -> Callable[[Lifecycle], None]:
    def reach(lifecycle: Lifecycle) -> None:
        lifecycle.set_state(State.HEALTHY)
        lifecycle.set_state(state)

    return reach


# What happened -> the status of /ping, /health and /live.
PHASES: dict[str, tuple[Callable[[Lifecycle], None], int, int, int]] = {
    "first start": (lambda lifecycle: None, 503, 503, 200),
    "first start has failed": (lambda lifecycle: lifecycle.set_state(State.FAILED), 503, 503, 503),
    "drained before it was ready": (
        lambda lifecycle: lifecycle.set_state(State.DRAINING), 503, 503, 200,
    ),
    "ready": (_reach(State.HEALTHY), 200, 200, 200),
    "engine restarts": (_restart, 503, 200, 200),
    "asleep or paused": (_reach(State.ASLEEP), 503, 200, 200),
    "stalled": (_reach(State.UNHEALTHY), 503, 200, 200),
    "draining": (_reach(State.DRAINING), 503, 200, 200),
    "failed for good": (_reach(State.FAILED), 503, 503, 503),
    "failed, and SERVING_HEALTH_CHECK_OVERRIDE": (_fail_openly, 200, 200, 503),
    "no model": (Lifecycle.remove_model, 200, 200, 200),
    "a registered model loads": (_register, 200, 200, 200),
}  # fmt: skip


@pytest.mark.parametrize("routes", LISTENERS.values(), ids=LISTENERS)
@pytest.mark.parametrize(("happened", "ping", "health", "live"), PHASES.values(), ids=PHASES)
async def test_health_is_liveness_once_the_model_was_ready(
    serve: ServeScripted,
    routes: Routes,
    happened: Callable[[Lifecycle], None],
    ping: int,
    health: int,
    live: int,
) -> None:
    """/health is 503 before the first token and when only a restart helps; on each address."""
    client = await serve(is_ready=False, options=WebOptions(routes=routes))
    happened(lifecycle_of(client))
    paths = (*HEALTH_PATHS, "/live", "/v1/health/live")
    asked = {path: (await client.get(path)).status for path in paths}
    assert asked == {
        **dict.fromkeys(READINESS, ping), "/health": health,
        "/live": live, "/v1/health/live": live,
    }  # fmt: skip


@pytest.mark.parametrize("path", [*HEALTH_PATHS, "/live", "/v2/health/live"])
async def test_health_is_bad_when_only_a_restart_helps(serve: ServeScripted, path: str) -> None:
    """A window of errors (`error_rate_*`) lasts until the process ends: no probe calls it alive."""
    client = await serve()
    lifecycle_of(client).mark_unhealthy("too many errors")
    assert (await client.get(path)).status == 503
    metrics = await (await client.get("/metrics?name[]=lmi_state")).text()
    assert 'lmi_state{state="Unhealthy"} 1.0' in metrics  # which an alert reads
    assert 'lmi_state{state="Healthy"} 0.0' in metrics


LIVENESS = {State.HEALTHY: 200, State.ASLEEP: 200, State.DRAINING: 200, State.FAILED: 503}


@pytest.mark.parametrize(("state", "status"), LIVENESS.items(), ids=str)
async def test_health_liveness(serve: ServeScripted, state: State, status: int) -> None:
    """Alive is what can still become ready, or is finishing its work."""
    client = await serve()
    lifecycle_of(client).set_state(state)
    assert (await client.get("/live")).status == status


@pytest.mark.parametrize(("method", "status"), METHODS.items(), ids=METHODS)
async def test_health_liveness_methods(serve: ServeScripted, method: str, status: int) -> None:
    """/live takes the methods of /ping."""
    assert (await (await serve()).request(method, "/live")).status == status


async def test_health_download_numbers_are_metrics_too(serve: ServeScripted) -> None:
    """While a model is fetched `/ping` and the metrics tell the same; the metrics keep the end."""
    client = await serve(is_ready=False)
    start = lifecycle_of(client).start
    start.enter(Phase.DOWNLOAD)
    start.report({"files": 2, "files_total": 5, "bytes": 70, "bytes_total": 900})
    (entry,) = (await (await client.get("/ping")).json()).values()
    assert (entry["bytes"], entry["bytes_total"]) == (70, 900)
    start.enter(Phase.ENGINE)
    lines = (await (await client.get("/metrics")).text()).splitlines()
    assert "lmi_download_bytes 70.0" in lines
    assert "lmi_download_bytes_expected 900.0" in lines
    assert "lmi_download_files 2.0" in lines
    assert "lmi_download_files_expected 5.0" in lines
