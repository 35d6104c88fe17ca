"""The `cohere` SDK against our process: vectors in two types, a ranking, errors; and its chat."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
cohere = pytest.importorskip("cohere", reason="needs the cohere SDK: make setup installs it")
TEXTS = ["rain", "sea"]


@contextlib.contextmanager
def _client(server: RunningServer, path: str = "") -> Iterator[Any]:
    with cohere.ClientV2(api_key="none", base_url=f"{server.url}{path}", max_retries=0) as client:
        yield client


def test_sdk_embeds_and_ranks(embedding_server: RunningServer) -> None:
    """A vector for each text, in each type that is asked for; each document has a rank."""
    types = ["float", "binary"]
    with _client(embedding_server) as client:
        made = client.embed(
            model="lmi", texts=TEXTS, input_type="search_document", embedding_types=types
        )
        ranked = client.rerank(model="lmi", query="rain", documents=["sea", "rain"])
    assert [len(vector) for vector in made.embeddings.float_] == [64, 64]
    assert [len(vector) for vector in made.embeddings.binary] == [8, 8]
    assert sorted(result.index for result in ranked.results) == [0, 1]


def test_sdk_raises_errors_of_its_own(embedding_server: RunningServer) -> None:
    """An unknown model, and a type that vLLM makes none of."""
    asked = {"texts": TEXTS, "input_type": "search_query"}
    with _client(embedding_server) as client:
        with pytest.raises(cohere.NotFoundError, match="does not exist"):
            client.embed(model="other", **asked)
        with pytest.raises(cohere.BadRequestError):
            client.embed(model="lmi", embedding_types=["int8"], **asked)


def test_sdk_chats(tgi_server: RunningServer) -> None:
    """Whole and streamed, where `VLLM_ENABLE_COHERE_API=1` has vLLM lay the route out."""
    asked = {
        "model": "lmi",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    with _client(tgi_server, "/cohere") as client:
        answer = client.chat(**asked)
        parts = [
            event.delta.message.content.text
            for event in client.chat_stream(**asked)
            if event.type == "content-delta"
        ]
    assert answer.message.content[0].text == "The capital of France is Paris."
    assert "".join(parts) == "The capital of France is Paris."
