from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.engine.scripted_engine import ScriptedEngine
from lmi_vllm.inference.adapters import Adapter
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web.keys import SERVICE
from tests.conftest import ServeScripted

HEADER = "x-amzn-sagemaker-adapter-identifier"
BOTH = ["x", "y"]


async def serve_two(serve: ServeScripted, **profile: Any) -> TestClient:
    """Return a client of a server with the adapters fr and de."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True, **profile))
    for name in ("fr", "de"):
        await client.app[SERVICE].runtime.adapters.register(Adapter(name, f"/adapters/{name}"))
    return client


# Query, headers, payload -> adapter of each job (adapters-api.md 7).
SELECTIONS: dict[str, tuple[str, dict[str, str], dict[str, Any], list[str | None]]] = {
    "none": ("", {}, {}, [None]),
    "header": ("", {"X-Amzn-SageMaker-Adapter-Identifier": "fr"}, {}, ["fr"]),
    "header, lower case": ("", {HEADER: "fr"}, {}, ["fr"]),
    "query": ("?adapter=fr", {}, {}, ["fr"]),
    "payload": ("", {}, {"adapters": "fr"}, ["fr"]),
    "payload, list of one": ("", {}, {"adapters": ["fr"]}, ["fr"]),
    "header beats query": ("?adapter=de", {HEADER: "fr"}, {}, ["fr"]),
    "query beats payload": ("?adapter=fr", {}, {"adapters": "de"}, ["fr"]),
    "header beats unknown payload": ("", {HEADER: "fr"}, {"adapters": "nobody"}, ["fr"]),
    "header beats odd payload": ("", {HEADER: "fr"}, {"adapters": 5}, ["fr"]),
    "empty text": ("", {}, {"adapters": ""}, [None]),
    "null": ("", {}, {"adapters": None}, [None]),
    "empty list": ("", {}, {"adapters": []}, [None]),
    "list of empty": ("", {}, {"adapters": [""]}, [None]),
    "empty header and query": ("?adapter=", {HEADER: ""}, {"adapters": "fr"}, ["fr"]),
    "inside parameters": ("", {}, {"parameters": {"adapters": "fr"}}, [None]),
    "list, one each": ("", {}, {"inputs": BOTH, "adapters": ["fr", "de"]}, ["fr", "de"]),
    "list, empty is base": ("", {}, {"inputs": BOTH, "adapters": ["fr", ""]}, ["fr", None]),
    "list, null is base": ("", {}, {"inputs": BOTH, "adapters": [None, "de"]}, [None, "de"]),
    "list, one name for all": ("", {}, {"inputs": BOTH, "adapters": "fr"}, ["fr", "fr"]),
    "list, empty list": ("", {}, {"inputs": BOTH, "adapters": []}, [None, None]),
    "list, header for all": (
        "",
        {HEADER: "fr"},
        {"inputs": BOTH, "adapters": ["de"]},
        ["fr", "fr"],
    ),
}


@pytest.mark.parametrize(
    ("query", "headers", "payload", "names"), SELECTIONS.values(), ids=SELECTIONS
)
async def test_adapter_selection(
    serve: ServeScripted,
    engine: ScriptedEngine,
    query: str,
    headers: dict[str, str],
    payload: dict[str, Any],
    names: list[str | None],
) -> None:
    """Header, then query, then `adapters`; an empty name is the base model."""
    client = await serve_two(serve)
    body = {"inputs": "x", **payload}
    response = await client.post("/invocations" + query, json=body, headers=headers)
    assert response.status == 200
    jobs = sorted(engine.jobs, key=lambda job: job.request_id)
    assert [job.adapter.name if job.adapter else None for job in jobs] == names


REFUSED: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "header": ("", {HEADER: "nobody"}, {}, "nobody"),
    "header, alias": ("", {HEADER: "nobody", "x-amzn-sagemaker-adapter-alias": "No"}, {}, "No "),
    "query": ("?adapter=nobody", {}, {}, "nobody"),
    "payload": ("", {}, {"adapters": "nobody"}, "nobody"),
    "one of a list": ("", {}, {"inputs": BOTH, "adapters": ["fr", "nobody"]}, "nobody"),
    "number": ("", {}, {"adapters": 5}, "adapters: expected a name"),
    "object": ("", {}, {"adapters": {}}, "adapters: expected a name"),
    "list of number": ("", {}, {"adapters": [5]}, "adapters: expected a name"),
    "two for one prompt": ("", {}, {"adapters": ["fr", "de"]}, "Number of adapters"),
    "one for two prompts": ("", {}, {"inputs": BOTH, "adapters": ["fr"]}, "Number of adapters"),
    "number in a list": ("", {}, {"inputs": BOTH, "adapters": ["fr", 5]}, "adapters: expected"),
}


@pytest.mark.parametrize(("query", "headers", "payload", "text"), REFUSED.values(), ids=REFUSED)
async def test_adapter_selection_refused(
    serve: ServeScripted,
    engine: ScriptedEngine,
    query: str,
    headers: dict[str, str],
    payload: dict[str, Any],
    text: str,
) -> None:
    """An adapter that is not there is never the base model: nothing is generated."""
    client = await serve_two(serve)
    body = {"inputs": "x", **payload}
    response = await client.post("/invocations" + query, json=body, headers=headers)
    assert response.status == 424
    assert text in (await response.json())["error"]
    assert engine.jobs == []


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", ["adapters", "model"])
async def test_adapter_selection_of_openai_payloads(
    serve: ServeScripted, engine: ScriptedEngine, path: str, field: str
) -> None:
    """OpenAI payloads name an adapter by `adapters` or `model`; the engine sees it as model."""
    client = await serve_two(serve)
    response = await client.post(path, json={"prompt": "x", field: "fr"})
    assert response.status == 200
    (call,) = engine.calls
    assert call.body == {"prompt": "x", "model": "fr"}


async def test_adapter_selection_of_openai_prefers_header(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """The header wins over the payload's model."""
    client = await serve_two(serve)
    body = {"prompt": "x", "model": "de"}
    await client.post("/v1/completions", json=body, headers={HEADER: "fr"})
    assert engine.calls[0].body["model"] == "fr"


async def test_adapter_selection_without_lora_is_refused(serve: ServeScripted) -> None:
    """With LoRA off no adapter is known."""
    client = await serve()
    response = await client.post("/invocations", json={"inputs": "x", "adapters": "fr"})
    assert response.status == 424
