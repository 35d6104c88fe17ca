"""TGI's schema on `/invocations` (`tgi_compat`): which adapter its `adapter_id` selects."""

from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import AdapterRef, GenerationJob, ServingProfile
from tests.conftest import ServeScripted
from tests.web.conftest import register

TGI = ServingProfile(model_name="demo", tgi_compat=True, enable_lora=True)
# Payload and headers -> the adapter that answers: adapter_id is below `adapters`.
ADAPTER_IDS: dict[str, tuple[dict[str, Any], dict[str, str], str | None]] = {
    "adapter_id": ({"parameters": {"adapter_id": "a"}}, {}, "a"),
    "adapters win": ({"parameters": {"adapter_id": "a"}, "adapters": "b"}, {}, "b"),
    "adapters empty is the base": (
        {"parameters": {"adapter_id": "a"}, "adapters": ""},
        {},
        None,
    ),
    "adapters null is the base": (
        {"parameters": {"adapter_id": "a"}, "adapters": None},
        {},
        None,
    ),
    "header wins": (
        {"parameters": {"adapter_id": "a"}},
        {"X-Amzn-SageMaker-Adapter-Identifier": "b"},
        "b",
    ),
    "above model": ({"parameters": {"adapter_id": "a"}, "model": "b"}, {}, "a"),
    "null": ({"parameters": {"adapter_id": None}}, {}, None),
}


async def check_adapter(
    client: TestClient,
    engine: ScriptedEngine,
    path: str,
    payload: dict[str, Any],
    headers: dict[str, str],
    name: str | None,
) -> None:
    """Ask at `path`; the adapter `name` answers."""
    await register(client, "a", "b")
    response = await client.post(path, json={"inputs": "x", **payload}, headers=headers)
    assert response.status == 200
    adapter: AdapterRef | None = engine.jobs[-1].adapter
    assert (adapter.name if adapter else None) == name


@pytest.mark.parametrize(("payload", "headers", "name"), ADAPTER_IDS.values(), ids=ADAPTER_IDS)
async def test_tgi_adapter_id_selects_below_adapters(
    serve: ServeScripted,
    engine: ScriptedEngine,
    payload: dict[str, Any],
    headers: dict[str, str],
    name: str | None,
) -> None:
    """TGI's adapter_id chooses an adapter where nothing of LMI's does."""
    await check_adapter(await serve(TGI), engine, "/invocations", payload, headers, name)


@pytest.mark.parametrize("name", ["adapter_id", "adapters"])
async def test_parameters_name_no_adapter_without_lora(
    serve: ServeScripted, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Where there are none the name has no effect, and one warning says so."""
    client = await serve(ServingProfile(model_name="demo"))
    for _ in range(2):
        body = {"inputs": "x", "parameters": {name: "a"}}
        assert (await client.post("/invocations", json=body)).status == 200
    job: GenerationJob = engine.jobs[-1]
    assert job.adapter is None
    assert [text for text in caplog.messages if "no effect" in text] == [
        f"request parameter '{name}' has no effect"
    ]


@pytest.mark.parametrize("path", ["/generate_stream", "/invocations", "/v1/chat/completions"])
async def test_tgi_streams_pass_a_proxy_row_by_row(serve: ServeScripted, path: str) -> None:
    """As TGI's: nginx collects rows unless the answer says otherwise."""
    body = {"inputs": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
    answer = await (await serve(TGI)).post(path, json=body)
    assert answer.headers["X-Accel-Buffering"] == "no"
    answer = await (await serve(TGI)).post(path, json={**body, "stream": False})
    assert ("X-Accel-Buffering" in answer.headers) == (path == "/generate_stream")
