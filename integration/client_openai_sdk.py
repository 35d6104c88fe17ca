"""The `openai` SDK against our process: chat, completions, responses, tools, embeddings."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
openai = pytest.importorskip("openai", reason="needs the openai SDK: make setup installs it")
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
CHAT: dict[str, Any] = {
    "model": "lmi",
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
}
PROMPT: dict[str, Any] = {
    "model": "lmi",
    "prompt": "The capital of France is",
    "temperature": 0,
    "max_tokens": 8,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,  # else vLLM holds the model to the call's form, not to its schema
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["sea", "moon"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """A schema that bounds what a tiny model may say."""

    name: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def sdk(demo_server: RunningServer) -> Any:
    """The SDK as its users make it."""
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none") as client:
        yield client


def test_sdk_chats(sdk: Any) -> None:
    """Chat answers whole and streamed, with usage and log probabilities where asked for."""
    whole = sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = list(
        sdk.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == ANSWER
    assert chunks[-1].usage == whole.usage


def test_sdk_completes(sdk: Any) -> None:
    """Completions answer whole and streamed."""
    whole = sdk.completions.create(**PROMPT).choices[0].text
    assert whole.startswith(" Paris.")
    streamed = sdk.completions.create(**PROMPT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole


def test_sdk_gets_responses(sdk: Any) -> None:
    """The Responses API answers whole and as typed events."""
    asked = {"model": "lmi", "input": QUESTION, "temperature": 0, "max_output_tokens": 20}
    assert sdk.responses.create(**asked).output_text == ANSWER
    events = list(sdk.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER
    assert events[-1].type == "response.completed"


def test_sdk_parses_structured_output(sdk: Any) -> None:
    """A schema given as a class comes back as its instance."""
    answer = sdk.chat.completions.parse(**CHAT, response_format=City)
    assert answer.choices[0].message.parsed.name in ("Paris", "Rome")


def test_sdk_sees_models_and_adapters(sdk: Any) -> None:
    """Adapters are models to this client, and an unknown one is its NotFoundError."""
    assert [model.id for model in sdk.models.list()] == ["lmi", "capitals", "json"]
    loud = sdk.completions.create(**{**PROMPT, "model": "capitals"}).choices[0].text
    assert loud == loud.upper()
    with pytest.raises(openai.NotFoundError, match="nobody"):
        sdk.chat.completions.create(**{**CHAT, "model": "nobody"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        sdk.chat.completions.create(**{**CHAT, "temperature": -1})


def test_sdk_calls_tools(tgi_server: RunningServer) -> None:
    """A named tool is called with arguments of its schema, whole and streamed."""
    named = {"type": "function", "function": {"name": "look"}}
    asked = {**CHAT, "tools": [TOOL], "tool_choice": named}
    with openai.OpenAI(base_url=f"{tgi_server.url}/v1", api_key="none") as sdk:
        (called,) = sdk.chat.completions.create(**asked).choices[0].message.tool_calls
        assert called.function.name == "look"
        assert json.loads(called.function.arguments)["place"] in ("sea", "moon")
        deltas = [
            delta
            for chunk in sdk.chat.completions.create(**asked, stream=True)
            for delta in chunk.choices[0].delta.tool_calls or ()
        ]
        arguments = "".join(delta.function.arguments or "" for delta in deltas)
        assert json.loads(arguments) == json.loads(called.function.arguments)
        assert deltas[0].function.name == "look"


def test_sdk_embeds(embedding_server: RunningServer) -> None:
    """Embeddings come back in order, as floats and through the SDK's own base64."""
    with openai.OpenAI(base_url=f"{embedding_server.url}/v1", api_key="none") as sdk:
        plain = sdk.embeddings.create(model="lmi", input=["rain", "sea"], encoding_format="float")
        packed = sdk.embeddings.create(model="lmi", input=["rain", "sea"])
    assert [item.index for item in plain.data] == [0, 1]
    for one, other in zip(plain.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
