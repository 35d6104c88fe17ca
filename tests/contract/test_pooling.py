"""Models that embed and rank on the real engine; numbers are checked against transformers."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.messages import AdapterRef, HttpCall, OpenAICall
from lmi_vllm.telemetry.records import RequestRecord, current_record, enter_record
from tests.contract.conftest import NO_ADAPTERS, LoopThread, start_demo_engine
from tests.contract.releases import needs, since
from tests.contract.vllm_configuration import translated

pytestmark = pytest.mark.vllm
HEADERS = [(b"content-type", b"application/json")]
TEXTS = ["the moon is a ball", "rain", "a river runs to the sea"]
POOLING_CALLS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("embeddings", "/v1/embeddings", {"input": TEXTS}),
    ("embeddings", "/v1/embeddings", {"input": "x", "encoding_format": "base64"}),
    ("embeddings", "/v1/embeddings", {"input": TEXTS, "encoding_format": "bytes"}),
    ("embeddings", "/v1/embeddings", {"input": [[5, 6, 7]], "model": "lmi"}),
    ("embeddings", "/v1/embeddings", {"messages": [{"role": "user", "content": "x"}]}),
    ("embeddings", "/v1/embeddings", {"input": "moon " * 500}),
    ("embeddings", "/v1/embeddings", {"input": "x", "dimensions": 7}),
    ("embeddings", "/v1/embeddings", {"input": 3.5}),
    ("embeddings", "/v1/embeddings", {"input": "x", "normalize": True}),
    ("embeddings", "/v1/embeddings", {"input": "x", "model": "nobody"}),
    ("embeddings", "/v1/embeddings", {}),
    ("rerank", "/rerank", {"query": "rain", "documents": TEXTS}),
    ("rerank", "/v1/rerank", {"query": "rain", "documents": TEXTS, "top_n": 1}),
    ("rerank", "/v2/rerank", {"query": "rain", "documents": []}),
    ("rerank", "/v2/rerank", {"query": "rain"}),
    ("score", "/score", {"text_1": "rain", "text_2": TEXTS}),
    ("score", "/v1/score", {"queries": ["rain"], "documents": TEXTS}),
    ("score", "/score", {"text_1": ["a", "b"], "text_2": TEXTS}),
    ("pooling", "/pooling", {"input": "rain"}),
    ("tokenize", "/tokenize", {"prompt": "rain"}),
    ("detokenize", "/detokenize", {"tokens": [5, 6]}),
)
Ask = Callable[..., tuple[int, Any]]


def _asking(run: LoopThread, engine: Engine) -> Ask:
    def ask(kind: str, **body: object) -> tuple[int, Any]:
        reply = run(engine.answer_openai(OpenAICall(kind, body, {}, "r1")))
        return reply.status, orjson.loads(reply.body)

    return ask


def _vectors(folder: Path, texts: list[str], pooling: str = "MEAN") -> Any:
    """Return what transformers alone makes of the texts."""
    import torch  # noqa: PLC0415 (slow to import)
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        rows.append(states[0] if pooling == "CLS" else states.mean(dim=0))
    return torch.stack(rows)


def _pair_scores(folder: Path, query: str, texts: list[str]) -> list[float]:
    """Return the sigmoid of what transformers alone computes for each pair."""
    import torch  # noqa: PLC0415 (slow to import)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        pairs = [tokenizer(query, text, return_tensors="pt") for text in texts]
        return [float(torch.sigmoid(model(**pair).logits)) for pair in pairs]


def test_embedding_matches_transformers(
    run: LoopThread, embedder: Engine, embedder_folder: Path
) -> None:
    """Without normalisation the vectors are the mean states; with it they have length one."""
    import torch  # noqa: PLC0415 (slow to import)

    ask = _asking(run, embedder)
    expected = _vectors(embedder_folder, TEXTS)
    for is_normal in (False, True):
        status, answer = ask("embeddings", input=TEXTS, use_activation=is_normal)
        assert status == 200, answer
        found = torch.tensor([item["embedding"] for item in answer["data"]])
        wanted = torch.nn.functional.normalize(expected) if is_normal else expected
        assert torch.allclose(found, wanted, atol=2e-5), (found - wanted).abs().max()
    assert abs(float(expected.norm(dim=1)[0]) - 1) > 0.1


def test_embedder_reports_its_task(run: LoopThread, embedder: Engine) -> None:
    """The task is known, and what the model cannot do is vLLM's 404, not a fault of the server."""
    ask = _asking(run, embedder)
    assert embedder.task == "embed"
    for kind, body in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("responses", {"input": "x"}),
        ("classify", {"input": "x"}),
    ):
        status, answer = ask(kind, **body)
        assert (status, answer["error"]["code"]) == (404, 404)
        assert "does not support" in answer["error"]["message"]


def test_embedder_ranks_by_cosine(run: LoopThread, embedder: Engine) -> None:
    """An embedding model scores and ranks texts by the cosine of their vectors."""
    import torch  # noqa: PLC0415 (slow to import)

    ask = _asking(run, embedder)
    _, answer = ask("embeddings", input=TEXTS)
    vectors = torch.tensor([item["embedding"] for item in answer["data"]])
    vectors = torch.nn.functional.normalize(vectors)
    cosines = (vectors @ vectors[0]).tolist()
    status, ranked = ask("rerank", query=TEXTS[0], documents=TEXTS)
    assert status == 200, ranked
    by_index = {item["index"]: item["relevance_score"] for item in ranked["results"]}
    assert [by_index[index] for index in range(3)] == pytest.approx(cosines, abs=1e-4)
    assert ranked["results"][0]["index"] == 0
    status, scored = ask("score", text_1=TEXTS[0], text_2=TEXTS[1])
    assert status == 200
    assert scored["data"][0]["score"] == pytest.approx(cosines[1], abs=1e-4)


def test_embedder_s_bytes_are_vllm_s(run: LoopThread, embedder: Engine) -> None:
    """Every pooling route answers as vLLM's own server over the same engine, errors included."""
    from tests.contract.vllm_server import VllmServer, same_bytes  # noqa: PLC0415 (imports vLLM)

    server = run(VllmServer.over(embedder))
    for kind, path, body in POOLING_CALLS:
        ours, theirs = run(same_bytes(embedder, server, kind, path, body))
        assert ours == theirs, (kind, body)


DISPATCHED: tuple[tuple[str, dict[str, object]], ...] = (
    ("embeddings", {"input": TEXTS}),
    ("embeddings", {"messages": [{"role": "user", "content": "x"}]}),
    ("rerank", {"query": "rain", "documents": TEXTS}),
    ("score", {"text_1": "rain", "text_2": TEXTS}),
    ("score", {"data_1": "rain", "data_2": TEXTS}),
    ("score", {"queries": "rain", "documents": TEXTS}),
    ("score", {"queries": "rain", "items": TEXTS}),
)


def _check_dispatch(run: LoopThread, engine: Engine, kind: str, body: dict[str, object]) -> None:
    """See that vLLM's dispatch answers a body as the route of its kind."""
    found = []
    for each in ("invocations", kind):
        headers = {"x-amzn-sagemaker-adapter-identifier": "none", "x-request-id": "r"}
        reply = run(engine.answer_openai(OpenAICall(each, body, headers, "r")))
        # How texts are batched moves the last digits.
        answer = json.loads(reply.body, parse_float=lambda digits: round(float(digits), 3))
        answer.pop("created", None)
        found.append((reply.status, answer))
    assert found[0] == found[1]
    assert "suitable handler" not in str(found)


@pytest.mark.parametrize(("kind", "body"), DISPATCHED)
def test_dispatch_is_vllm_s(
    run: LoopThread, embedder: Engine, kind: str, body: dict[str, object]
) -> None:
    """What `/invocations` hands on is answered as on its route; SageMaker's headers stay here."""
    _check_dispatch(run, embedder, kind, body)


def test_dispatch_refuses_unknown_bodies(run: LoopThread, embedder: Engine) -> None:
    """In an error object that names what it knows."""
    reply = run(embedder.answer_openai(OpenAICall("invocations", {"text": "x"}, {}, "r")))
    assert reply.status == 400
    assert b"Cannot find suitable handler" in reply.body


def test_generation_s_dispatch_knows_two_kinds() -> None:
    """Both by keys of ours: another of a new release has to be looked at."""
    from vllm.entrypoints.generate.factories import (  # noqa: PLC0415 (imports vLLM)
        get_generate_invocation_types,
    )

    names = [kind.__name__ for kind, _ in get_generate_invocation_types(("generate",))]
    assert names == ["ChatCompletionRequest", "CompletionRequest"]


def test_embedder_refusals_equal_vllm_s(run: LoopThread, embedder: Engine) -> None:
    """Too long a text, no text and an unknown dimension are 400; the engine lives on."""
    ask = _asking(run, embedder)
    for body in ({"input": "moon " * 500}, {"input": []}, {"input": "x", "dimensions": 7}):
        status, answer = ask("embeddings", **body)
        assert (status, answer["error"]["code"]) == (400, 400), answer
    assert ask("embeddings", input="x")[0] == 200


def test_ranker_scores_as_transformers(
    run: LoopThread, ranker: Engine, ranker_folder: Path
) -> None:
    """A cross-encoder's scores are the sigmoid of what transformers computes for each pair."""
    expected = _pair_scores(ranker_folder, "rain", TEXTS)
    assert ranker.task == "classify"
    ask = _asking(run, ranker)
    status, scored = ask("score", text_1="rain", text_2=TEXTS)
    assert status == 200, scored
    found = [item["score"] for item in scored["data"]]
    assert found == pytest.approx(expected, abs=1e-4)
    status, ranked = ask("rerank", query="rain", documents=TEXTS, top_n=1)
    assert ranked["results"][0]["index"] == expected.index(max(expected))
    status, answer = ask("classify", input="rain")
    assert status == 200, json.dumps(answer)
    _check_dispatch(run, ranker, "classify", {"input": "rain"})
    _check_dispatch(run, ranker, "rerank", {"query": "rain", "documents": TEXTS})


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [("RobertaModel", "CLS"), ("XLMRobertaForSequenceClassification", ""),
     ("DistilBertModel", "CLS")],
)  # fmt: skip
def test_newer_families_match_transformers(
    run: LoopThread, tmp_path: Path, architecture: str, pooling: str
) -> None:
    """RoBERTa's positions start behind the padding token; wrong ones: other vectors, with 200."""
    _compare_with_transformers(run, tmp_path, architecture, pooling)


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [("CamembertModel", "MEAN"), ("Data2VecTextModel", "MEAN"), ("DistilBertForMaskedLM", "MEAN"),
     ("CamembertForSequenceClassification", ""), ("DistilBertForSequenceClassification", "")],
)  # fmt: skip
def test_their_relatives_match_transformers(
    run: LoopThread, tmp_path: Path, architecture: str, pooling: str
) -> None:
    """Other heads, and models that differ in their names."""
    _compare_with_transformers(run, tmp_path, architecture, pooling)


def _compare_with_transformers(
    run: LoopThread, tmp_path: Path, architecture: str, pooling: str
) -> None:
    import torch  # noqa: PLC0415 (slow to import)

    from tests.support.tiny_models import family_member  # noqa: PLC0415 (imports torch)

    folder = family_member(tmp_path / "model", architecture)
    lines = f"option.pooler_config={json.dumps({'pooling_type': pooling})}\n" if pooling else ""
    arguments = translated(lines, folder).values
    named = ("hf_overrides", "pooler_config")
    changes = {name: arguments[name] for name in named if name in arguments}
    engine = start_demo_engine(run, model=str(folder), **NO_ADAPTERS, **changes)
    try:
        ask = _asking(run, engine)
        if pooling:
            _, answer = ask("embeddings", input=TEXTS, use_activation=False)
            found = torch.tensor([item["embedding"] for item in answer["data"]])
            expected = _vectors(folder, TEXTS, pooling)
        else:
            _, answer = ask("score", text_1="rain", text_2=TEXTS)
            found = torch.tensor([item["score"] for item in answer["data"]])
            expected = torch.tensor(_pair_scores(folder, "rain", TEXTS))
        assert torch.allclose(found, expected, atol=1e-4), (found - expected).abs().max()
    finally:
        run(engine.close())


def _adapter_of(folder: Path, adapter: Path, merged: Path) -> None:
    """Write an adapter of each linear layer of a DistilBERT's encoder, and the merged model."""
    import torch  # noqa: PLC0415 (slow to import)
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    shutil.copytree(folder, merged)
    adapter.mkdir()
    weights, parts = load_file(folder / "model.safetensors"), {}
    draw = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith(("_lin.weight", ".lin1.weight", ".lin2.weight")):
            down = torch.randn(4, weight.shape[1], generator=draw) / 4
            up = torch.randn(weight.shape[0], 4, generator=draw) / 4
            module = f"base_model.model.{name.removesuffix('.weight')}"
            parts |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
            weights[name] = weight + 2 * up @ down
    assert len(parts) == 2 * 2 * 6
    save_file(parts, adapter / "adapter_model.safetensors")
    targets = ["q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, merged / "model.safetensors", {"format": "pt"})


@since("0.33", "before it vLLM has no LoRA layers for BERT's class")
def test_adapter_of_a_distilbert_answers_as_its_merged_weights(
    run: LoopThread, tmp_path: Path
) -> None:
    """The base model beside it is as it was."""
    from tests.support.tiny_models import family_member  # noqa: PLC0415 (imports torch)

    folder = family_member(tmp_path / "model", "DistilBertForSequenceClassification")
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    _adapter_of(folder, adapter, merged)
    expected = [_pair_scores(one, "rain", TEXTS) for one in (merged, folder)]
    assert expected[0] != pytest.approx(expected[1], abs=1e-2)
    overrides = translated("option.enable_lora=true", folder).values["hf_overrides"]
    engine = start_demo_engine(run, model=str(folder), hf_overrides=overrides)
    try:
        ref = AdapterRef("own", str(adapter), 50_000)
        run(engine.load_adapter(ref))
        body = {"text_1": "rain", "text_2": TEXTS}
        for used, scores in zip((ref, None), expected, strict=True):
            reply = run(engine.answer_openai(OpenAICall("score", body, {}, "r1", used)))
            found = [item["score"] for item in orjson.loads(reply.body)["data"]]
            assert found == pytest.approx(scores, abs=1e-4)
    finally:
        run(engine.close())


@needs("transformers:GteConfig")  # what Transformers has says what is right
@pytest.mark.parametrize("architecture", ["NewModel", "NewForSequenceClassification"])
def test_gte_v15_matches_transformers(run: LoopThread, tmp_path: Path, architecture: str) -> None:
    """VLLM has its class under another name; `trust_remote_code` reads its configuration alone."""
    import torch  # noqa: PLC0415 (slow to import)
    from transformers import AutoTokenizer  # noqa: PLC0415 (slow to import)

    from tests.support.tiny_models import gte_v15  # noqa: PLC0415 (imports torch)

    folder = tmp_path / "model"
    model = gte_v15(folder, architecture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arguments = translated("option.trust_remote_code=true", folder).values
    changes = {name: arguments[name] for name in ("hf_overrides", "trust_remote_code")}
    engine = start_demo_engine(run, model=str(folder), **NO_ADAPTERS, **changes)
    try:
        ask = _asking(run, engine)
        if architecture == "NewModel":
            _, answer = ask("embeddings", input=TEXTS, use_activation=False)
            found = [item["embedding"] for item in answer["data"]]
            with torch.no_grad():
                inputs = [tokenizer(text, return_tensors="pt") for text in TEXTS]
                expected = [model(**each).last_hidden_state[0, 0].tolist() for each in inputs]
        else:
            _, answer = ask("score", text_1="rain", text_2=TEXTS)
            found = [item["score"] for item in answer["data"]]
            with torch.no_grad():
                inputs = [tokenizer("rain", text, return_tensors="pt") for text in TEXTS]
                expected = [torch.sigmoid(model(**each).logits[0, 0]).item() for each in inputs]
        wanted, got = torch.tensor(expected), torch.tensor(found)
        assert torch.allclose(got, wanted, atol=1e-4), (got - wanted).abs().max()
    finally:
        run(engine.close())


LONG = "moon " * 400_000
LONG_TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a text": ("embedder", "/v1/embeddings", {"input": LONG}),
    "of LMI": ("embedder", "/pooling", {"input": [LONG, "rain"]}),
    "texts to compare": ("embedder", "/score", {"text_1": "rain", "text_2": LONG}),
    "texts to rank": ("ranker", "/rerank", {"query": LONG, "documents": [LONG, "rain"]}),
}


@pytest.mark.parametrize("truncate", [5, None])
@pytest.mark.parametrize(("kind", "path", "body"), LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_long_text_is_cut_or_refused_before_it_is_tokenized(
    run: LoopThread,
    request: pytest.FixtureRequest,
    kind: str,
    path: str,
    body: dict[str, Any],
    truncate: int | None,
) -> None:
    """2 MB held the one thread that tokenizes for 2 to 3 s; the answer is that of its beginning."""
    engine: Engine = request.getfixturevalue(kind)
    assert engine.http is not None

    def ask(body: dict[str, Any]) -> tuple[int, Any, float]:
        given = {"model": "lmi", **body, "truncate_prompt_tokens": truncate}
        call = HttpCall("POST", path, "", HEADERS, orjson.dumps(given), "long")
        began = time.process_time()
        reply = run(engine.http.call(call))
        return reply.status, orjson.loads(reply.body), time.process_time() - began

    ask(body)  # the first call imports
    status, answer, seconds = ask(body)
    assert seconds < 0.5
    if truncate is None:
        assert status == 400, answer
        return
    shorter = orjson.loads(orjson.dumps(body).replace(LONG.encode(), LONG[:130].encode()))
    assert _figures(answer) == pytest.approx(_figures(ask(shorter)[1]), abs=1e-5)


def _figures(answer: Any) -> list[float]:
    rows = answer.get("data") or answer["results"]
    found = [row.get("embedding", row.get("data", row.get("score", row.get("relevance_score"))))
             for row in rows]  # fmt: skip
    return [one for row in found for one in (row if isinstance(row, list) else [row])]


def test_thread_that_reads_the_texts_of_a_request_knows_whose_it_is(
    run: LoopThread, embedder: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a name of a picture there is the client's own."""
    renderer = embedder._llm.renderer  # type: ignore[attr-defined]
    seen: list[Any] = []
    plain = renderer.process_for_engine

    def process_for_engine(*given: Any, **more: Any) -> Any:
        seen.append(current_record())
        return plain(*given, **more)

    monkeypatch.setattr(renderer, "process_for_engine", process_for_engine)
    record = RequestRecord("", "", "", "", "192.0.2.1", "")

    async def ask() -> Any:
        enter_record(record)
        body = orjson.dumps({"model": "lmi", "input": "rain"})
        return await embedder.http.call(  # type: ignore[union-attr]
            HttpCall("POST", "/v1/embeddings", "", HEADERS, body, "whose")
        )

    assert run(ask()).status == 200
    assert seen == [record]
