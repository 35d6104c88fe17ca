"""Models and the log level over HTTP: exact bodies and codes (docs/requests.md#management)."""

import logging
from collections.abc import Iterator

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.model_control import ModelInfo
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.web.conftest import lifecycle_of

INFO = ModelInfo("/opt/ml/model", start_time="2030-01-02T03:04:05Z", device_type="gpu")
NO_METHOD = "Requested method is not allowed, please refer to API document."


@pytest.fixture
async def client(serve: ServeScripted) -> TestClient:
    """Return a client of a server with the model `demo`."""
    client = await serve(limit=7)
    client.app[SERVICE].model = INFO
    return client


async def test_models_lists_the_one_model_in_pages(client: TestClient) -> None:
    """A page beyond it is empty; a limit out of range is 100."""
    whole = b'{"models":[{"modelName":"demo","modelUrl":"/opt/ml/model","status":"READY"}]}\n'
    pages = {"": whole, "?limit=500": whole, "?next_page_token=1": b'{"models":[]}\n'}
    pages["?limit=0"] = b'{"models":[],"nextPageToken":"0"}\n'
    for query, body in pages.items():
        assert await (await client.get(f"/models{query}")).read() == body
    assert (await client.get("/models?limit=x")).status == 400


async def test_model_is_described_in_upstreams_shape(client: TestClient) -> None:
    """All fields, with a version in the path as well."""
    model = {
        "modelName": "demo",
        "modelUrl": "/opt/ml/model",
        "batchSize": 1,
        "maxBatchDelayMillis": 100,
        "maxIdleSeconds": 60,
        "queueSize": 7,
        "requestInQueue": 0,
        "status": "Healthy",
        "loadedAtStartup": True,
        "workerGroups": [
            {
                "device": {"deviceType": "gpu", "deviceId": 0},
                "minWorkers": 1,
                "maxWorkers": 1,
                "workers": [{"id": 1, "startTime": "2030-01-02T03:04:05Z", "status": "READY"}],
            }
        ],
    }
    for path in ("/models/demo", "/models/demo/1"):
        answer = await client.get(path)
        assert await answer.json() == [{"workflowName": "demo", "models": [model]}]


REFUSALS = {
    "describe": ("GET", "/models/other", 404, "Workflow not found: other"),
    "no-url": ("POST", "/models", 400, "Parameter url is required."),
    "workers": (
        "POST",
        "/models?url=/m&min_worker=x",
        400,
        "Parameter min_worker: expected a whole number (got x)",
    ),
    "scale": ("PUT", "/models/other", 404, "Model or workflow not found: other"),
    "scale-text": (
        "PUT",
        "/models/demo?max_worker=-1",
        400,
        "Parameter max_worker: expected a whole number (got -1)",
    ),
    "delete": ("DELETE", "/models/other", 404, "Model or workflow not found: other"),
    "delete-startup": ("DELETE", "/models/demo", 405, NO_METHOD),
    "put-list": ("PUT", "/models", 405, NO_METHOD),
    "post-one": ("POST", "/models/demo", 405, NO_METHOD),
    "level": (
        "POST",
        "/server/logging?level=loud",
        400,
        "level: expected one of trace, debug, info, warn, error, fatal, off (got loud)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_models_refusals(client: TestClient, case: str) -> None:
    """Each has its own status and text."""
    method, path, status, text = REFUSALS[case]
    answer = await client.request(method, path)
    body = await answer.json()
    assert (answer.status, body["code"], body["message"]) == (status, status, text)


async def test_models_second_model_has_no_room(client: TestClient) -> None:
    """507: one model per process; the same name is a conflict."""
    answer = await client.post("/models", json={"url": "/opt/other"})
    assert (answer.status, "one model per process" in await answer.text()) == (507, True)
    answer = await client.post("/models?url=/opt/ml/model&model_name=demo")
    assert answer.status == 409
    assert "Workflow demo is already registered." in await answer.text()


async def test_models_scaling_is_accepted(client: TestClient) -> None:
    """It changes the figures alone; a model that is not ready is 503."""
    text = 'Workflow "demo" worker scaled. New Worker configuration min workers:2 max workers:4'
    answer = await client.put("/models/demo?min_worker=2&max_worker=4")
    assert await answer.json() == {"status": text}
    described = await (await client.get("/models/demo")).json()
    (group,) = described[0]["models"][0]["workerGroups"]
    assert (group["minWorkers"], group["maxWorkers"]) == (2, 4)
    assert [worker["id"] for worker in group["workers"]] == [1, 2]
    await client.put("/models/demo?min_worker=999999999")
    described = await (await client.get("/models/demo")).json()
    assert len(described[0]["models"][0]["workerGroups"][0]["workers"]) == 256
    lifecycle_of(client).become(State.PENDING)
    assert (await client.put("/models/demo?min_worker=2")).status == 503


@pytest.fixture
def log_levels() -> Iterator[None]:
    """Give back the levels."""
    loggers = (logging.getLogger(), logging.getLogger("vllm"))
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("log_levels")
async def test_log_level_is_set(client: TestClient) -> None:
    """Upstream's names; without one it is info."""
    for query, level in (("?level=ERROR", 40), ("?level=trace", 10), ("", 20), ("?level=off", 51)):
        answer = await client.post(f"/server/logging{query}")
        assert (await answer.read(), logging.getLogger().level) == (b'{"status":"OK"}\n', level)
