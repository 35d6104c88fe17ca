"""Vectors and scores that are not finite are errors, on every route, and cost others nothing.

Each fails without the guards of `scheduler` and `async_llm`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import Engine
from lmi_vllm.messages import HttpCall, OpenAICall
from tests.contract.adapter_loader import IDS, Loader
from tests.contract.conftest import LoopThread, start_demo_engine
from tests.support.adapter_files import make_adapter

pytestmark = pytest.mark.vllm
GOOD, NOT_FINITE = "rain on the sea", "quiet"  # the letter q is NaN


def _post(run: LoopThread, engine: Engine, path: str, body: dict[str, object]) -> tuple[int, str]:
    assert engine.http is not None
    headers = [(b"content-type", b"application/json")]
    content = json.dumps(body).encode()
    reply = run(engine.http.call(HttpCall("POST", path, "", headers, content, f"p{next(IDS)}")))
    return reply.status, reply.body.decode()


def _check(run: LoopThread, engine: Engine, path: str, make: Callable[[str], Any]) -> None:
    status, text = _post(run, engine, path, make(NOT_FINITE))
    assert (status, "not finite" in text) == (500, True), text
    status, text = _post(run, engine, path, make(GOOD))
    assert status == 200, text


EMBEDDER_CALLS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "embeddings": ("/v1/embeddings", lambda text: {"input": [GOOD, text]}),
    "base64": ("/v1/embeddings", lambda text: {"input": text, "encoding_format": "base64"}),
    "bytes": ("/v1/embeddings", lambda text: {"input": text, "encoding_format": "bytes"}),
    "pooling": ("/pooling", lambda text: {"input": text}),
    "cohere": (
        "/v2/embed",
        lambda text: {"model": "lmi", "texts": [text], "embedding_types": ["float"]},
    ),
    "score": ("/score", lambda text: {"text_1": GOOD, "text_2": [GOOD, text]}),
    "rerank": ("/rerank", lambda text: {"query": GOOD, "documents": [text, GOOD]}),
    "query": ("/rerank", lambda text: {"query": text, "documents": [GOOD]}),
}
RANKER_CALLS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "classify": ("/classify", lambda text: {"input": [GOOD, text]}),
    "score": ("/score", lambda text: {"text_1": GOOD, "text_2": [text]}),
    "rerank": ("/v2/rerank", lambda text: {"query": GOOD, "documents": [text]}),
}


@pytest.mark.parametrize(("path", "make"), EMBEDDER_CALLS.values(), ids=EMBEDDER_CALLS)
def test_embedding_that_is_not_finite_is_an_error(
    run: LoopThread, embedder: Engine, path: str, make: Callable[[str], Any]
) -> None:
    """One bad text is enough; each counts for health; the next texts are answered."""
    known = embedder.not_finite
    _check(run, embedder, path, make)
    assert embedder.not_finite > known


@pytest.mark.parametrize(("path", "make"), RANKER_CALLS.values(), ids=RANKER_CALLS)
def test_score_that_is_not_finite_is_an_error(
    run: LoopThread, ranker: Engine, path: str, make: Callable[[str], Any]
) -> None:
    """The same of a cross-encoder."""
    known = ranker.not_finite
    _check(run, ranker, path, make)
    assert ranker.not_finite > known


def test_not_finite_embedding_of_an_openai_call_is_an_error(
    run: LoopThread, embedder: Engine
) -> None:
    """LMI's payloads on `/invocations` become this call, which is an error, too."""
    reply = run(embedder.answer_openai(OpenAICall("embeddings", {"input": NOT_FINITE}, {}, "r1")))
    assert (reply.status, b"not finite" in reply.body) == (500, True)


def test_not_finite_adapter_vectors_fail_only_their_own_request(
    run: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A causal model embeds with `convert`, and has a KV cache: the base embeds as before."""
    monkeypatch.setattr("lmi_vllm.engine.vllm.adapter_files.check_values", lambda *_: None)
    engine = start_demo_engine(run, model=str(DEMO_MODEL_DIR), runner="auto", convert="embed")
    loader = Loader(run, engine)

    def ask(adapter: Any = None) -> tuple[int, Any]:
        body = {"input": [GOOD * 20, GOOD]} | ({"model": adapter.name} if adapter else {})
        call = OpenAICall("embeddings", body, {}, f"p{next(IDS)}", adapter)
        reply = run(engine.answer_openai(call))
        return reply.status, json.loads(reply.body).get("data")

    try:
        assert engine.task == "embed"
        expected = ask()
        assert (expected[0], len(expected[1])) == (200, 2)
        bad = loader.load(make_adapter(tmp_path / "bad", 1, float("nan")))
        for _ in range(3):
            assert ask(bad)[0] == 500
            assert ask() == expected
        assert engine.not_finite == 0  # an adapter's, not the model's
    finally:
        run(engine.close())
