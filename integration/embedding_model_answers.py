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


def test_generation_is_refused_and_the_server_keeps_serving(
    embedding_server: RunningServer,
) -> None:
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
        "--model",
        str(folder),
        "--port",
        "0",
        environ={"OPTION_TASK": "text-generation"},
        is_forked=True,
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


def test_hooks_run_around_embeddings(server_process: StartServer, tmp_path: Path) -> None:
    """The client's own shape in, vLLM's answer to the hook, the hook's body out.

    vLLM's pooling handlers make bytes, not objects: the hook gets what they say as a dict.
    """
    from tests.support.tiny_models import bert_embedder  # noqa: PLC0415 (imports torch)

    folder = bert_embedder(tmp_path / "model")
    properties = "option.task=text-embedding\noption.enforce_eager=true\noption.dtype=fp32\n"
    (folder / "serving.properties").write_text(properties, encoding="utf-8")
    write_code(folder, EMBEDDING_HOOKS)
    server = server_process("--model", str(folder), "--port", "0", is_forked=True)
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


TEXTS = ["the moon is a ball", "rain"]


def _state(folder: Path, text: str, pooling: str) -> list[float]:
    """Return what transformers alone makes of a text."""
    import torch  # noqa: PLC0415 (slow to import)
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        states = model(**tokens).last_hidden_state[0]
    vector: list[float] = (states[0] if pooling == "cls" else states.mean(dim=0)).tolist()
    return vector


def test_lmi_s_rust_configuration_embeds_as_it_pools(
    server_process: StartServer, embedding_server: RunningServer, tmp_path: Path
) -> None:
    """LMI's sample, its model and its directory replaced; the vectors are transformers'.

    How a model pools is chosen when it starts, so this is another server than the one that pools
    as the model's own files say.
    """
    from tests.support.tiny_models import bert_embedder  # noqa: PLC0415 (imports torch)

    folder = bert_embedder(tmp_path / "model")
    lines = ("engine=Rust", "pooling=cls", "batch_size=8", "option.task=text_embedding",
             "normalize=False", "truncation=true", "option.enforce_eager=true",
             "option.dtype=fp32")  # fmt: skip
    (folder / "serving.properties").write_text("\n".join(lines), encoding="utf-8")
    server = server_process("--model", str(folder), "--port", "0", is_forked=True)
    url = server.url_when_ready()
    expected = [_state(folder, text, "cls") for text in TEXTS]
    assert call(url, "/invocations", {"inputs": TEXTS}).json() == [
        pytest.approx(vector, abs=1e-4) for vector in expected
    ]
    one = call(url, "/invocations", {"inputs": TEXTS[1]}).json()
    assert one == pytest.approx(expected[1], abs=1e-4)
    shaped = call(url, "/v1/embeddings", {"input": TEXTS[1]}).json()
    assert shaped["data"][0]["embedding"] == pytest.approx(expected[1], abs=1e-4)
    cut = call(url, "/invocations", {"inputs": "moon " * 500})
    assert (cut.status, len(cut.json())) == (200, 64)
    plain = {"inputs": TEXTS[1], "parameters": {"normalize": False}}
    [mean] = call(embedding_server.url, "/invocations", plain).json()
    assert mean == pytest.approx(_state(folder, TEXTS[1], "mean"), abs=1e-4)
    assert mean != pytest.approx(one, abs=1e-2)


def test_lmi_s_reranker_scores_pairs(server_process: StartServer, tmp_path: Path) -> None:
    """LMI's sample and its client's request: the sigmoid of what transformers computes.

    No other scenario has a server over a model that ranks.
    """
    import torch  # noqa: PLC0415 (slow to import)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: PLC0415

    from tests.support.tiny_models import bert_ranker  # noqa: PLC0415 (imports torch)

    folder = bert_ranker(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [
            float(model(**tokenizer("rain", text, return_tensors="pt")).logits) for text in TEXTS
        ]
    expected = [1 / (1 + math.exp(-logit)) for logit in logits]
    lines = ("engine=Rust", "reranking=True", "batch_size=8", "option.task=text_embedding",
             "normalize=False", "option.enforce_eager=true", "option.dtype=fp32")  # fmt: skip
    (folder / "serving.properties").write_text("\n".join(lines), encoding="utf-8")
    server = server_process("--model", str(folder), "--port", "0", is_forked=True)
    url = server.url_when_ready()
    pairs = [{"key": "rain", "value": text} for text in TEXTS]
    found = call(url, "/invocations", pairs).json()
    assert found == [pytest.approx([score], abs=1e-4) for score in expected]
    assert call(url, "/invocations", pairs[0]).json() == pytest.approx(expected[:1], abs=1e-4)
    ranked = call(url, "/invocations", {"query": "rain", "texts": TEXTS}).json()
    assert ranked == [pytest.approx([score], abs=1e-4) for score in expected]
    refused = call(url, "/invocations", {"text": "rain"})
    assert refused.status == 424
    assert "text_pair" in refused.json()["error"]
    assert call(url, "/rerank", {"query": "rain", "documents": TEXTS}).status == 200
