"""KServe's routes over the scripted engine: its shapes outside, everything of ours around them."""

import json
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.errors import EngineFailureError
from lmi_vllm.features.deferred.results import Deferrals, DeferredResults
from lmi_vllm.features.scripted.engine import Fail, ScriptedEngine
from lmi_vllm.features.text_embedding.requests import TextStep
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web.request import SERVICE, Routes, WebOptions
from tests.conftest import ServeScripted
from tests.support.assembled import load_settings
from tests.web.conftest import lifecycle_of, register

INFER = "/v2/models/demo/infer"
ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def texts(*values: str, name: str = "inputs") -> dict[str, Any]:
    """Return a tensor of texts."""
    return {"name": name, "shape": [len(values)], "datatype": "BYTES", "data": list(values)}


def number(name: str, value: float, datatype: str = "INT32") -> dict[str, Any]:
    """Return a tensor of one number."""
    return {"name": name, "shape": [1], "datatype": datatype, "data": [value]}


async def infer(client: TestClient, *inputs: dict[str, Any], **more: Any) -> tuple[int, Any]:
    """Return status and body of an inference request."""
    answer = await client.post(INFER, json={"inputs": list(inputs), **more})
    return answer.status, await answer.json()


async def test_infer_text_to_text(serve: ServeScripted, engine: ScriptedEngine) -> None:
    """A text comes back continued, with the id of the request."""
    status, body = await infer(
        await serve(), texts("one two three"), id="42", parameters={"max_new_tokens": 2}
    )
    assert (status, body) == (
        200,
        {
            "model_name": "demo",
            "id": "42",
            "outputs": [
                {"name": "generated_text", "shape": [1], "datatype": "BYTES", "data": [" one two"]}
            ],
        },
    )
    assert engine.jobs[0].sampling["max_tokens"] == 2


async def test_infer_several_texts_with_parameters_as_tensors(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """Texts are a batch; a tensor beside them is the parameter of its name."""
    status, body = await infer(
        await serve(),
        texts("one", "two", name="text_input"),
        number("max_new_tokens", 1),
        number("temperature", 0.5, "FP32"),
        texts("x", "y", name="stop_sequences"),
    )
    assert status == 200, body
    assert body["outputs"][0]["data"] == [" one", " two"]
    assert body["outputs"][0]["shape"] == [2]
    sampling = engine.jobs[0].sampling
    assert (sampling["max_tokens"], sampling["temperature"]) == (1, 0.5)
    assert sampling["stop"] == ["x", "y"]
    assert body["id"]


async def test_infer_gives_details_where_they_are_an_output(serve: ServeScripted) -> None:
    """Only the outputs that are asked for come back; details are JSON."""
    client = await serve()
    status, body = await infer(
        client, texts("a b"), outputs=[{"name": "details"}], parameters={"max_new_tokens": 2}
    )
    assert status == 200
    (tensor,) = body["outputs"]
    assert tensor["name"] == "details"
    assert json.loads(tensor["data"][0])["generated_tokens"] == 2
    status, body = await infer(client, texts("a b"), outputs=[{"name": "logits"}])
    assert (status, list(body)) == (400, ["error"])
    assert "logits" in body["error"]


async def test_infer_binary_data_both_ways(serve: ServeScripted) -> None:
    """Triton's extension: the texts follow the JSON part, here and there."""
    packed = b"\x07\0\0\0one two"
    head = {
        "parameters": {"max_new_tokens": 2},
        "inputs": [
            {
                "name": "text_input",
                "shape": [1, 1],
                "datatype": "BYTES",
                "parameters": {"binary_data_size": len(packed)},
            }
        ],
        "outputs": [{"name": "generated_text", "parameters": {"binary_data": True}}],
    }
    text = json.dumps(head).encode()
    headers = {
        "Inference-Header-Content-Length": str(len(text)),
        "Content-Type": "application/octet-stream",
    }
    answer = await (await serve()).post(INFER, data=text + packed, headers=headers)
    body = await answer.read()
    assert (answer.status, answer.content_type) == (200, "application/octet-stream"), body
    length = int(answer.headers["Inference-Header-Content-Length"])
    (tensor,) = json.loads(body[:length])["outputs"]
    assert tensor["parameters"] == {"binary_data_size": len(body) - length}
    assert "data" not in tensor
    assert body[length:] == b"\x08\0\0\0 one two"


async def test_infer_selects_adapters_in_every_way(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """By header, query, parameter and tensor; an unknown one is never the base model."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    await register(client, "a")
    asked: list[dict[str, Any]] = [
        {"headers": {ADAPTER_HEADER: "a"}, "json": {"inputs": [texts("x")]}},
        {"params": {"adapter": "a"}, "json": {"inputs": [texts("x")]}},
        {"json": {"inputs": [texts("x")], "parameters": {"adapters": "a"}}},
        {"json": {"inputs": [texts("x"), texts("a", name="adapters")]}},
    ]
    for options in asked:
        assert (await client.post(INFER, **options)).status == 200
        used = engine.jobs[-1].adapter
        assert used is not None
        assert used.name == "a"
    status, body = await infer(client, texts("x"), parameters={"adapters": "b"})
    assert (status, list(body)) == (404, ["error"])


def deep(levels: int) -> list[Any]:
    """Return lists in lists."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


BAD = {
    "no JSON": (b"{", "not valid JSON"),
    "no object": (b"[]", "JSON object"),
    "no inputs": (b"{}", "list of tensors"),
    "id": ({"id": 3, "inputs": [texts("x")]}, "id"),
    "parameters": ({"parameters": [], "inputs": [texts("x")]}, "parameters"),
    "outputs": ({"outputs": ["x"], "inputs": [texts("x")]}, "outputs"),
    "numbers": ({"inputs": [number("inputs", 1)]}, "expected texts"),
    "empty": ({"inputs": [texts()]}, "expected texts"),
    "twice": (
        {"parameters": {"seed": 1}, "inputs": [texts("x"), number("seed", 1)]},
        "seed: given twice",
    ),
    "stream": ({"parameters": {"stream": True}, "inputs": [texts("x")]}, "stream"),
    "levels": (
        {"parameters": {"a": deep(300)}, "inputs": [texts("x")]},
        "parameters: they may nest at most 200 levels",
    ),
    "range": ({"parameters": {"top_p": 2}, "inputs": [texts("x")]}, "top_p"),
}


@pytest.mark.parametrize(("body", "said"), BAD.values(), ids=BAD)
async def test_infer_names_the_wrong_field(serve: ServeScripted, body: object, said: str) -> None:
    """A bad request is 400 with the protocol's error object."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await (await serve()).post(INFER, data=sent)
    found = await answer.json()
    assert (answer.status, list(found)) == (400, ["error"]), found
    assert said in found["error"]


@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded"]
)
async def test_infer_names_a_form_as_one(serve: ServeScripted, kind: str) -> None:
    """`curl -F` and `curl -d` without a type: the error was about a letter of the form."""
    answer = await (await serve()).post(INFER, data=b"a=b", headers={"Content-Type": kind})
    said = f"forms are not read here, and it is {kind.partition(';')[0]}"
    assert (answer.status, said in (await answer.json())["error"]) == (400, True)


async def test_the_served_name_is_the_model_s_too(serve: ServeScripted) -> None:
    """`--served-model-name` is what clients know; only the folder's name was found."""
    client = await serve()
    for path in ("/v2/models/lmi", "/v2/models/lmi/ready"):
        assert (await client.get(path)).status == 200
    answer = await client.post("/v2/models/lmi/infer", json={"inputs": [texts("x")]})
    assert (answer.status, (await answer.json())["model_name"]) == (200, "lmi")
    assert (await client.post("/predictions/lmi", json={"inputs": "x"})).status == 200


async def test_errors_of_every_layer_have_the_protocol_s_shape(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """Key, path, method, size, queue, readiness and engine: {"error": text}, with our statuses."""
    engine.script = (Fail(EngineFailureError("it broke")),)
    sent = {"json": {"inputs": [texts("x")]}}
    keyed, small = WebOptions(api_keys=("k",)), WebOptions(max_request_size=10)
    for status, options, method, path, more in (
        (401, {"options": keyed}, "POST", INFER, sent),
        (401, {"options": keyed}, "GET", "/v2", {}),
        (404, {}, "POST", "/v2/models/other/infer", sent),
        (404, {}, "GET", "/v2/models/other", {}),
        (404, {}, "GET", "/v2/models/other/ready", {}),
        (404, {}, "GET", "/v2/nothing", {}),
        (405, {}, "GET", INFER, {}),
        (413, {"options": small}, "POST", INFER, sent),
        (503, {"limit": 0}, "POST", INFER, sent),
        (503, {"is_ready": False}, "POST", INFER, sent),
        (500, {}, "POST", INFER, sent),
    ):
        client = await serve(**options)
        answer = await client.request(method, path, **more)
        body = await answer.json()
        assert (answer.status, list(body)) == (status, ["error"]), (path, body)
        if "other" in path:
            assert body["error"] == "Model not found: other"  # as LMI's plug-in says it
        assert answer.headers["x-request-id"]
        assert ("Retry-After" in answer.headers) == (status == 503)


async def test_vllm_s_rerank_keeps_its_own_errors(serve: ServeScripted) -> None:
    """`/v2/rerank` lies below the prefix and is vLLM's."""
    client = await serve(options=WebOptions(api_keys=("k",)))
    body = await (await client.post("/v2/rerank", json={})).json()
    assert body["error"]["type"] == "AuthenticationError"


async def test_health_needs_no_key_and_reports_the_state(serve: ServeScripted) -> None:
    """Live while it can become ready, ready while it answers."""
    client = await serve(options=WebOptions(api_keys=("k",)), is_ready=False)
    lifecycle = lifecycle_of(client)
    for state, is_live, is_ready in (
        (State.PENDING, True, False),
        (State.HEALTHY, True, True),
        (State.FAILED, False, False),
    ):
        lifecycle.set_state(state)
        for path, name, value in (
            ("/v2/health/live", "live", is_live),
            ("/v2/health/ready", "ready", is_ready),
            ("/v2/models/model/ready", "ready", is_ready),
            ("/v2/models/model/versions/1/ready", "ready", is_ready),
        ):
            answer = await client.get(path.replace("model/", f"{lifecycle.model_name}/"))
            assert answer.status == (200 if value else 503), (path, state)
            assert (await answer.json())[name] is value


async def test_metadata_names_inputs_and_outputs(serve: ServeScripted) -> None:
    """The server says its extensions, the model its tensors, by its task."""
    client = await serve()
    assert (await (await client.get("/v2")).json())["extensions"] == ["binary_tensor_data"]
    for path in ("/v2/models/demo", "/v2/models/demo/versions/1"):
        described = await (await client.get(path)).json()
        assert described["inputs"] == [{"name": "inputs", "datatype": "BYTES", "shape": [-1]}]
        assert described["outputs"][0]["name"] == "generated_text"
    client = await serve(ServingProfile(model_name="demo", task="embed"))
    (output,) = (await (await client.get("/v2/models/demo")).json())["outputs"]
    assert (output["name"], output["datatype"]) == ("embedding", "FP32")


async def test_infer_on_an_embedding_model(serve: ServeScripted) -> None:
    """Vectors are a matrix of FP32; the feature for such models makes them."""
    client = await serve(ServingProfile(model_name="demo", task="embed"))
    TextStep(load_settings({})).add_to(client.app[SERVICE].runtime.steps)
    status, body = await infer(client, texts("a", "b"))
    assert status == 200
    (tensor,) = body["outputs"]
    assert (tensor["name"], tensor["datatype"]) == ("embedding", "FP32")
    rows, columns = tensor["shape"]
    assert rows == 2
    assert len(tensor["data"]) == rows * columns


@pytest.mark.parametrize("framing", ["jsonlines", "sse"])
async def test_infer_on_a_server_that_always_streams(serve: ServeScripted, framing: str) -> None:
    """`output_formatter` may turn streaming on; here the answer is whole nevertheless."""
    client = await serve(ServingProfile(model_name="demo", output_formatter=framing))
    status, body = await infer(client, texts("one two"), parameters={"max_new_tokens": 2})
    assert (status, body["outputs"][0]["data"]) == (200, [" one two"])


async def test_infer_is_recorded_and_never_deferred(serve: ServeScripted) -> None:
    """Requests count and are logged under the dialect `kserve`; nothing here is answered later."""
    client, seen = await serve(), []
    service = client.app[SERVICE]
    service.steps.deferrals.append(Deferrals(DeferredResults(), service.queue).defer)
    client.app[SERVICE].telemetry.observers = (seen.append,)
    answer = await client.post(
        INFER, json={"inputs": [texts("x")]}, headers={"x-synchronous": "false"}
    )
    assert answer.status == 200
    (summary,) = seen
    assert (summary.dialect, summary.route) == ("kserve", "/v2/models/{model}/infer")
    assert summary.generated_tokens == 30


async def test_management_listener_has_no_inference(serve: ServeScripted) -> None:
    """With a management address these routes are on the other one."""
    client = await serve(options=WebOptions(routes=Routes.MANAGEMENT))
    assert (await client.get("/v2/health/live")).status == 404
