"""Models and the log level over HTTP: exact bodies and codes (docs/requests.md#management)."""

import logging
from collections.abc import Iterator

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.inference.service import ModelInfo
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted

INFO = ModelInfo("/opt/ml/model", start_time="2030-01-02T03:04:05Z", device_type="gpu")


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
    await check_refusal(client, *REFUSALS[case])


async def check_refusal(client: TestClient, method: str, path: str, status: int, text: str) -> None:
    """A request is refused with this status and message."""
    answer = await client.request(method, path)
    body = await answer.json()
    assert (answer.status, body["code"], body["message"]) == (status, status, text)


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
