"""A model that embeds, as a process: found out by itself, warmed up by an embedding, both lanes."""

import json
import math
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import RunningServer, StartServer
from tests.support.hook_files import write_code

pytestmark = pytest.mark.vllm


def _length(vector: list[float]) -> float:
    return math.sqrt(sum(value * value for value in vector))


def test_lmi_and_openai_give_the_same_vectors(embedding_server: RunningServer) -> None:
    """`inputs` gives an array of unit vectors; /v1/embeddings the model's own, in vLLM's shape."""
    texts = ["the moon is a ball", "rain"]
    answer = call(embedding_server.url, "/invocations", {"inputs": texts})
    assert answer.status == 200, answer.body
    assert answer.body.endswith(b"]]\n")
    vectors = answer.json()
    assert [len(vector) for vector in vectors] == [64, 64]
    assert [_length(vector) for vector in vectors] == pytest.approx([1, 1], abs=1e-4)
    shaped = call(
        embedding_server.url, "/v1/embeddings", {"input": texts, "use_activation": True}
    ).json()
    assert shaped["object"] == "list"
    assert [item["embedding"] for item in shaped["data"]] == vectors
    plain = call(
        embedding_server.url, "/invocations", {"inputs": "rain", "parameters": {"normalize": False}}
    ).json()
    assert _length(plain[0]) > 1.1


def test_invocations_dispatch_by_the_payload_s_keys(embedding_server: RunningServer) -> None:
    """VLLM's own payloads work on /invocations as on their routes."""
    for path, body in (
        ("/v1/embeddings", {"input": "rain"}),
        ("/rerank", {"query": "rain", "documents": ["sea", "rain"]}),
        ("/score", {"text_1": "rain", "text_2": "sea"}),
        ("/score", {"queries": "rain", "items": ["sea"]}),
    ):
        there = call(embedding_server.url, path, body)
        here = call(embedding_server.url, "/invocations", body)
        assert (there.status, here.status) == (200, 200), (there.body, here.body)
        assert here.body.endswith(b"\n")
        assert _without_times(here.json()) == _without_times(there.json())


def _without_times(document: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in document.items() if name not in ("id", "created")}


def test_generation_is_refused_and_the_server_lives(embedding_server: RunningServer) -> None:
    """What the model cannot do is the client's fault: 424 here, 404 on vLLM's routes."""
    refused = call(embedding_server.url, "/invocations", {"prompt": "x"})
    assert refused.status == 424
    assert "does not generate" in refused.json()["error"]
    refused = call(embedding_server.url, "/v1/chat/completions", {"messages": []})
    assert refused.status == 404
    refused = call(embedding_server.url, "/invocations", {"inputs": "moon " * 500})
    assert refused.status == 424
    assert "128" in refused.json()["error"]
    assert call(embedding_server.url, "/ping").status == 200
    assert call(embedding_server.url, "/invocations", {"inputs": "x"}).status == 200


def test_runner_generate_on_an_embedder_fails_the_start(
    server_process: StartServer, tmp_path: Path
) -> None:
    """A model that cannot generate, told to, ends the start with a reason."""
    from tests.support.tiny_models import bert_embedder  # noqa: PLC0415 (imports torch)

    folder = bert_embedder(tmp_path / "model")
    server = server_process(
        "--model", str(folder), "--port", "0", environ={"OPTION_TASK": "text-generation"}
    )
    assert server.wait_exit(90) == 1
    assert "runner" in server.stderr.splitlines()[-1], json.dumps(server.stderr[-2000:])


EMBEDDING_HOOKS = """
    from djl_python.input_parser import input_formatter
    from djl_python.output_formatter import output_formatter

    @input_formatter
    def to_payload(decoded_payload, **kwargs):
        if "say" in decoded_payload:
            return {"inputs": [word.lower() for word in decoded_payload["say"]]}
        if "boom" in decoded_payload:
            raise ValueError("no boom here")
        return decoded_payload

    @output_formatter
    def to_answer(output):
        lengths = [len(one["embedding"]) for one in output["data"]]
        return {"kind": type(output).__name__, "lengths": lengths}
"""


def test_hooks_stand_around_embeddings(server_process: StartServer, tmp_path: Path) -> None:
    """The client's own shape in, vLLM's answer to the hook, the hook's body out.

    vLLM's pooling handlers make bytes, not objects: the hook gets what they say as a dict.
    """
    from tests.support.tiny_models import bert_embedder  # noqa: PLC0415 (imports torch)

    folder = bert_embedder(tmp_path / "model")
    properties = "option.task=text-embedding\noption.enforce_eager=true\noption.dtype=fp32\n"
    (folder / "serving.properties").write_text(properties, encoding="utf-8")
    write_code(folder, EMBEDDING_HOOKS)
    server = server_process("--model", str(folder), "--port", "0")
    url = server.url_when_ready()
    for path, body in (
        ("/invocations", {"say": ["Rain", "SEA"]}),
        ("/invocations", {"inputs": ["rain", "sea"]}),
        ("/invocations", {"input": ["rain", "sea"]}),
        ("/v1/embeddings", {"input": ["rain", "sea"]}),
    ):
        answer = call(url, path, body)
        assert answer.json() == {"kind": "dict", "lengths": [64, 64]}, (path, answer)
    failed = call(url, "/invocations", {"boom": 1})
    assert (failed.status, failed.json()["code"]) == (424, 424)
    assert "Custom formatter failed" in failed.json()["error"]
    refused = call(url, "/invocations", {"inputs": 5})  # vLLM is never asked, nor the output hook
    assert refused.status == 424
