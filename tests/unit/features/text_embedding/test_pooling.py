"""A model that embeds, over HTTP: LMI's vectors, vLLM's routes, and what it refuses."""

import pytest

from lmi_vllm.errors import RequestError
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.features.text_embedding.pooling import vectors_reply
from lmi_vllm.messages import OpenAIReply, ServingProfile
from tests.conftest import ServeScripted

EMBEDDER = ServingProfile(model_name="demo", task="embed")


async def _ask(serve: ServeScripted, body: object, **fields: object) -> tuple[int, bytes]:
    profile = ServingProfile(model_name="demo", **{"task": "embed", **fields})
    response = await (await serve(profile, limit=4)).post("/invocations", json=body)
    return response.status, await response.read()


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"inputs": "a b"}, b"[[3.0,2.0]]\n"),
        ({"inputs": ["a b", "xyz"]}, b"[[3.0,2.0],[3.0,1.0]]\n"),
        ({}, b"[[0.0,0.0]]\n"),
        ({"inputs": "a", "model": "any"}, b"[[1.0,1.0]]\n"),
    ],
    ids=["text", "list", "nothing", "unknown model"],
)
async def test_embedding_is_always_an_array_of_vectors(
    serve: ServeScripted, body: object, answer: bytes
) -> None:
    """One vector per input, a newline at the end (docs/embeddings.md#embeddings)."""
    assert await _ask(serve, body) == (200, answer)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": 3}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a", 3]}, "inputs"),
        ({"inputs": "a", "stream": True}, "stream"),
        ({"inputs": "a", "parameters": 3}, "parameters"),
        ({"inputs": "a", "parameters": {"normalize": "yes"}}, "parameters.normalize"),
        ({"inputs": "a", "parameters": {"truncate": True}}, "parameters.truncate"),
        ({"prompt": "a"}, "does not generate"),
        ({"inputs": ["a"] * 5}, "job_queue_size"),
        ({"input": ["a"] * 5}, "job_queue_size"),
        ({"query": "a", "documents": ["a"] * 5}, "job_queue_size"),
    ],
)
async def test_embedding_refusal_names_the_field(
    serve: ServeScripted, body: object, words: str
) -> None:
    """What an embedding model cannot do is the client's fault, 424."""
    status, answer = await _ask(serve, body)
    assert status == 424
    assert words in answer.decode()


@pytest.mark.parametrize(
    ("task", "body", "kind"),
    [
        ("embed", {"inputs": "a"}, "embeddings"),
        ("embed", {"input": "a"}, "invocations"),
        ("embed", {"query": "a", "documents": ["b"]}, "invocations"),
        ("embed", {"text_1": "a", "text_2": "b"}, "invocations"),
        ("embed", {"queries": "a", "documents": ["b"]}, "invocations"),
        ("classify", {"inputs": "a"}, "classify"),
        ("classify", {"input": "a"}, "invocations"),
        ("embed", {"queries": "a", "items": ["b"]}, "invocations"),
        ("plugin", {"data": {"a": 1}}, "invocations"),
        ("classify", {"text_1": "a", "text_2": "b"}, "invocations"),
        ("token_embed", {"inputs": "a"}, "pooling"),
    ],
)
async def test_pooling_payload_reaches_its_handler(
    serve: ServeScripted, engine: ScriptedEngine, task: str, body: object, kind: str
) -> None:
    """LMI's by the model's task; of vLLM's own shapes its dispatch says which handler answers."""
    status, _ = await _ask(serve, body, task=task)
    assert status == 200
    assert [call.kind for call in engine.calls] == [kind]


@pytest.mark.parametrize(
    ("profile", "parameters", "sent"),
    [
        (True, {}, {"use_activation": True}),
        (False, {}, {"use_activation": False}),
        (True, {"normalize": False}, {"use_activation": False}),
        (True, {"dimensions": 8}, {"use_activation": True, "dimensions": 8}),
        (True, {"truncate": 5}, {"use_activation": True, "truncate_prompt_tokens": 5}),
        (True, {"nonsense": 5}, {"use_activation": True}),
    ],
)
async def test_embedding_parameters_become_vllm_s(
    serve: ServeScripted,
    engine: ScriptedEngine,
    profile: bool,
    parameters: object,
    sent: dict[str, object],
) -> None:
    """option.normalize is the default, a request's own parameter wins."""
    await _ask(serve, {"inputs": "a", "parameters": parameters}, normalize=profile)
    assert dict(engine.calls[0].body) == {"input": ["a"], **sent}


async def test_names_without_effect_are_warned_of_once(
    serve: ServeScripted, caplog: pytest.LogCaptureFixture
) -> None:
    """A client may invent any number: a line for each would hold up all others."""
    client = await serve(EMBEDDER)
    body = {"inputs": "a", "parameters": {f"n{number}": 1 for number in range(9)}}
    for _ in range(2):
        assert (await client.post("/invocations", json=body)).status == 200
    assert sum("has no effect" in line for line in caplog.messages) == 9


async def test_embedding_releases_its_queue_slots(serve: ServeScripted) -> None:
    """Each element takes a place while it runs, and gives it back."""
    client = await serve(EMBEDDER, limit=4)
    for _ in range(3):
        for path, body in (
            ("/invocations", {"inputs": ["a"] * 4}),
            ("/v1/embeddings", {"input": ["a"] * 4}),
            ("/v1/embeddings", {"input": [5] * 40}),  # one prompt of 40 tokens
        ):
            assert (await client.post(path, json=body)).status == 200
    response = await client.post("/v1/embeddings", json={"input": ["a"] * 5})
    assert response.status == 400
    assert "job_queue_size" in (await response.json())["error"]["message"]


def test_refusal_of_vllm_is_no_vectors() -> None:
    """Too long a text: vLLM answers 400 with its error object, and that is what is raised."""
    body = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
    with pytest.raises(RequestError, match="too long"):
        vectors_reply(OpenAIReply(400, body))
