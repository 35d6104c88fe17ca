"""KServe's protocol on the real engine: the same texts and vectors as on /invocations."""

import json

import pytest

from integration.client import call
from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm

PROMPTS = ["The capital of France is", "The moon is"]
GREEDY = {"max_new_tokens": 6}


def _texts(name: str, values: list[str]) -> dict[str, object]:
    return {"name": name, "shape": [len(values), 1], "datatype": "BYTES", "data": values}


def test_infer_gives_the_texts_of_invocations(demo_server: RunningServer) -> None:
    """A batch of texts, its parameters in the request or as tensors."""
    ours = call(demo_server.url, "/invocations", {"inputs": PROMPTS, "parameters": GREEDY}).json()
    (name,) = call(demo_server.url, "/ping").json()
    limit = {"name": "max_new_tokens", "shape": [1], "datatype": "INT32", "data": [6]}
    for request in (
        {"id": "7", "inputs": [_texts("inputs", PROMPTS)], "parameters": GREEDY},
        {"id": "7", "inputs": [_texts("text_input", PROMPTS), limit]},
    ):
        answer = call(demo_server.url, f"/v2/models/{name}/infer", request)
        assert answer.status == 200, answer.body
        body = answer.json()
        assert (body["id"], body["model_name"]) == ("7", name)
        (tensor,) = body["outputs"]
        assert tensor["data"] == [one["generated_text"] for one in ours]


def test_infer_with_an_adapter_and_binary_data(demo_server: RunningServer) -> None:
    """An adapter by parameter; the text in Triton's binary form, as its clients send it."""
    (name,) = call(demo_server.url, "/ping").json()
    adapters = call(demo_server.url, "/adapters").json()["adapters"]
    adapter = adapters[0]["name"]
    payload = {"inputs": PROMPTS[0], "parameters": GREEDY, "adapters": adapter}
    ours = call(demo_server.url, "/invocations", payload).json()
    text = PROMPTS[0].encode()
    packed = len(text).to_bytes(4, "little") + text
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES"}
    head = {
        "parameters": {**GREEDY, "adapters": adapter},
        "inputs": [{**tensor, "parameters": {"binary_data_size": len(packed)}}],
    }
    sent = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(sent))}
    answer = call(
        demo_server.url, f"/v2/models/{name}/infer", sent + packed, method="POST", headers=headers
    )
    assert answer.status == 200, answer.body
    assert answer.json()["outputs"][0]["data"] == [ours["generated_text"]]


def test_infer_errors_have_the_protocol_s_form(demo_server: RunningServer) -> None:
    """What the engine refuses is a 400 with a text."""
    (name,) = call(demo_server.url, "/ping").json()
    request = {"inputs": [_texts("inputs", ["moon " * 5000])]}
    answer = call(demo_server.url, f"/v2/models/{name}/infer", request)
    assert answer.status == 400, answer.body
    assert list(answer.json()) == ["error"]
    assert call(demo_server.url, "/v2/health/ready").json() == {"ready": True}


def test_infer_gives_the_vectors_of_invocations(embedding_server: RunningServer) -> None:
    """On a model that embeds a batch becomes a matrix."""
    vectors = call(embedding_server.url, "/invocations", {"inputs": PROMPTS}).json()
    (name,) = call(embedding_server.url, "/ping").json()
    request = {"inputs": [_texts("inputs", PROMPTS)]}
    (tensor,) = call(embedding_server.url, f"/v2/models/{name}/infer", request).json()["outputs"]
    assert (tensor["datatype"], tensor["shape"]) == ("FP32", [2, len(vectors[0])])
    assert tensor["data"] == pytest.approx([x for vector in vectors for x in vector])
