"""The one model over HTTP: exact bodies and codes (docs/requests.md#management)."""

from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.features.management.managed_model import ShownModel, managed_model
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.golden.dialogues import Dialogue, load_dialogues
from tests.web.conftest import lifecycle_of
from tests.web.test_headers import check_wrong_method

SHOWN = ShownModel(start_time="2030-01-02T03:04:05Z", device_type="gpu")
DIALOGUES = load_dialogues(Path(__file__).parent / "dialogues")
NO_METHOD = "Requested method is not allowed, please refer to API document."
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
}
ALLOWED = {
    "/models/demo": ("DELETE", "GET, HEAD, PUT"),  # the model of the start stays
    "/models/other": ("POST", "DELETE, GET, HEAD, PUT"),
    "/models/demo/1": ("PUT", "GET, HEAD"),
    "/server/logging": ("GET", "POST"),
}


@pytest.fixture
async def client(serve: ServeScripted) -> TestClient:
    """Return a client of a server with the model `demo`."""
    client = await serve(limit=7)
    service = client.app[SERVICE]
    service.model_url, managed_model(service).shown = "/opt/ml/model", SHOWN
    return client


async def test_models_lists_the_one_model_in_pages(client: TestClient) -> None:
    """A page beyond it is empty; a limit out of range is 100."""
    whole = b'{"models":[{"modelName":"demo","modelUrl":"/opt/ml/model","status":"READY"}]}\n'
    pages = {"": whole, "?limit=500": whole, "?next_page_token=1": b'{"models":[]}\n'}
    for query, body in pages.items():
        assert await (await client.get(f"/models{query}")).read() == body
    for refused in ("x", "0"):
        assert (await client.get(f"/models?limit={refused}")).status == 400


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


@pytest.mark.parametrize("dialogue", DIALOGUES, ids=lambda dialogue: dialogue.name)
async def test_golden_dialogue_is_exact(serve: ServeScripted, dialogue: Dialogue) -> None:
    """Model management answers with these bytes and headers."""
    await dialogue.check(await serve(dialogue.profile))


async def check_refusal(client: TestClient, method: str, path: str, status: int, text: str) -> None:
    """A request is refused with this status and message."""
    answer = await client.request(method, path)
    body = await answer.json()
    assert (answer.status, body["code"], body["message"]) == (status, status, text)


@pytest.mark.parametrize("case", REFUSALS)
async def test_models_refusals(client: TestClient, case: str) -> None:
    """Each has its own status and text."""
    await check_refusal(client, *REFUSALS[case])


@pytest.mark.parametrize(("path", "method", "allow"), [(p, *v) for p, v in ALLOWED.items()])
async def test_wrong_method_says_which_are_right(
    serve: ServeScripted, path: str, method: str, allow: str
) -> None:
    """405 carries Allow (RFC 9110, 15.5.6)."""
    await check_wrong_method(await serve(), path, method, allow)


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
    for asked, bounds in (("max_worker=8", (2, 8)), ("min_worker=3", (3, 8)), ("", (3, 8)),
                          ("max_worker=1", (1, 1))):  # fmt: skip
        answer = await client.put(f"/models/demo?{asked}")
        stated = "min workers:{} max workers:{}".format(*bounds)
        assert (await answer.json())["status"].endswith(stated), asked
    await client.put("/models/demo?min_worker=999999999")
    described = await (await client.get("/models/demo")).json()
    assert len(described[0]["models"][0]["workerGroups"][0]["workers"]) == 256
    lifecycle_of(client).set_state(State.PENDING)
    assert (await client.put("/models/demo?min_worker=2")).status == 503


async def test_models_before_the_engine_is_there(serve: ServeScripted) -> None:
    """The list needs no engine: it says that the model is on its way."""
    assert (await (await serve(is_ready=False)).get("/models")).status == 200
