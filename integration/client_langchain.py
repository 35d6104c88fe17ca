"""`langchain-openai` against our process: chat, stream, structured output, completion, vectors."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
langchain = pytest.importorskip(
    "langchain_openai", reason="needs langchain-openai: make setup installs it"
)
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


class City(BaseModel):
    """A schema that bounds what a tiny model may say."""

    name: Literal["Paris", "Rome"]


def _at(server: RunningServer) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "model": "lmi"}


def test_langchain_chats(demo_server: RunningServer) -> None:
    """A chat model answers whole and streamed, counts its tokens and keeps to a schema."""
    chat = langchain.ChatOpenAI(**_at(demo_server), temperature=0)
    answer = chat.invoke(QUESTION)
    assert answer.content == ANSWER
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
    city = chat.with_structured_output(City, method="json_schema").invoke(QUESTION)
    assert city.name in ("Paris", "Rome")


def test_langchain_completes(demo_server: RunningServer) -> None:
    """The plain language model completes."""
    model = langchain.OpenAI(**_at(demo_server), temperature=0, max_tokens=8)
    assert model.invoke("The capital of France is").startswith(" Paris.")


def test_langchain_embeds(embedding_server: RunningServer) -> None:
    """Vectors come back; its token counting is off, as it is OpenAI's own and needs the network."""
    vectors = langchain.OpenAIEmbeddings(
        **_at(embedding_server), check_embedding_ctx_length=False
    ).embed_documents(["rain", "sea"])
    assert [len(vector) for vector in vectors] == [64, 64]
