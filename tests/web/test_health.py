import pytest

from lmi_vllm.inference.lifecycle import Phase, State
from tests.conftest import ServeScripted
from tests.web.conftest import lifecycle_of

HEALTH_PATHS = ("/ping", "/ready", "/health")
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
    """The three health paths say the same, byte for byte."""
    client = await serve()
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
