"""Requests as LMI's Rust and OnnxRuntime engines take them, and the shapes of the answers."""

import json
import math

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.engine.base import DirectEvents
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.features.text_embedding.requests import TextStep
from lmi_vllm.messages import OpenAICall, OpenAIReply, ServingProfile
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.support.assembled import load_settings

RANKER = ServingProfile(model_name="demo", task="classify")
EMBEDDER = ServingProfile(model_name="demo", task="embed")
PAIR = {"text": "rain", "text_pair": "a"}
OTHER = {"key": "rain", "value": "abc"}


class ScoringEngine(ScriptedEngine):
    """Scores a pair by the length of its second text, minus two; the rows come in any order."""

    async def answer_openai(
        self, call: OpenAICall, direct: DirectEvents | None = None
    ) -> OpenAIReply:
        """Answer in vLLM's shape."""
        reply = await super().answer_openai(call, direct)
        if call.kind != "score":
            return reply
        rows = [
            {"index": index, "score": len(text) - 2.0}
            for index, text in enumerate(call.body["text_2"])
        ]
        return OpenAIReply(200, json.dumps({"data": rows[::-1]}).encode())


@pytest.fixture
def engine() -> ScriptedEngine:
    """An engine that scores."""
    return ScoringEngine()


async def _client(serve: ServeScripted, profile: ServingProfile, **options: str) -> TestClient:
    """Return a client of a server whose model has these options."""
    client = await serve(profile, limit=4)
    variables = {f"OPTION_{name.upper()}": text for name, text in options.items()}
    steps = client.app[SERVICE].runtime.steps
    steps.decoders.clear()
    steps.answers.clear()
    TextStep(load_settings(variables)).add_to(steps)
    return client


async def _ask(client: TestClient, body: object) -> tuple[int, object]:
    response = await client.post("/invocations", json=body)
    return response.status, json.loads(await response.read())


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


LOW, HIGH = _sigmoid(-1), _sigmoid(1)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (PAIR, [LOW]),
        (OTHER, [HIGH]),
        ([PAIR, OTHER], [[LOW], [HIGH]]),
        ([OTHER], [[HIGH]]),
        ({"inputs": [PAIR, OTHER]}, [[LOW], [HIGH]]),
        ({"inputs": PAIR}, [LOW]),
        ({"query": "rain", "texts": ["abc", "a"]}, [[HIGH], [LOW]]),
    ],
    ids=["text", "key", "list", "list of one", "inputs", "pair in inputs", "query"],
)
async def test_pairs_are_scored_as_by_lmi(
    serve: ServeScripted, engine: ScriptedEngine, body: object, answer: list[object]
) -> None:
    """A pair is a tensor of one score; several are a list of those, in the order of the request."""
    client = await _client(serve, RANKER)
    status, found = await _ask(client, body)
    assert status == 200
    assert str(found).count("[") == str(answer).count("[")
    assert json.dumps(found)[:1] == "["
    flat, wanted = [_flat(found), _flat(answer)]
    assert flat == pytest.approx(wanted)
    [call] = engine.calls
    assert (call.kind, call.body["use_activation"]) == ("score", False)
    assert call.body["text_1"] == ["rain"] * len(wanted)


def _flat(scores: object) -> list[float]:
    return [part for one in scores for part in _flat(one)] if isinstance(scores, list) else [scores]  # type: ignore[list-item]


async def test_scores_may_stay_the_model_s(serve: ServeScripted) -> None:
    """sigmoid=false: what the model computes; its size is no matter either way."""
    client = await _client(serve, RANKER, sigmoid="false")
    assert await _ask(client, PAIR) == (200, [-1.0])
    client = await _client(serve, RANKER)
    assert await _ask(client, {"text": "a", "text_pair": "x" * 2000}) == (200, [1.0])


@pytest.mark.parametrize(
    "body",
    [{"text": "a"}, {"key": "a"}, {"query": "a", "texts": "b"}, {"texts": ["a"]}, [PAIR, "text"],
     {"query": "a", "texts": []}, [PAIR, {"text": 3, "text_pair": "b"}],
     {"key": "a", "text_pair": "b"}],
)  # fmt: skip
async def test_half_a_pair_is_refused(serve: ServeScripted, body: object) -> None:
    """The client's fault, in words that say what a pair is."""
    status, answer = await _ask(await _client(serve, RANKER), body)
    assert status == 424
    assert "text with text_pair" in str(answer)


async def test_each_pair_takes_a_queue_slot(serve: ServeScripted) -> None:
    """Each pair is a request of its own in the engine."""
    client = await _client(serve, RANKER)
    status, answer = await _ask(client, [PAIR] * 5)
    assert status == 424
    assert "job_queue_size" in str(answer)
    assert (await _ask(client, [PAIR] * 4))[0] == 200


@pytest.mark.parametrize(
    ("task", "body"),
    [("embed", {"inputs": "a"}), ("classify", {"inputs": PAIR}), ("classify", PAIR)],
    ids=["text", "pair in inputs", "pair"],
)
@pytest.mark.parametrize(
    ("model", "status"), [("demo", 424), (["fr"], 424), ("lmi", 200), ("", 200), (None, 200)]
)
async def test_base_model_answers_for_no_other_model_beside_texts(
    serve: ServeScripted, task: str, body: dict[str, object], model: object, status: int
) -> None:
    """While LoRA is on, as for generation."""
    client = await _client(serve, ServingProfile(model_name="demo", task=task, enable_lora=True))
    assert (await _ask(client, {**body, "model": model}))[0] == status


@pytest.mark.parametrize("task", ["generate", "embed"])
async def test_only_a_model_that_ranks_scores_pairs(serve: ServeScripted, task: str) -> None:
    """A pair means nothing to another model."""
    client = await _client(serve, ServingProfile(model_name="demo", task=task))
    status, answer = await _ask(client, [PAIR])
    assert status == 424
    assert ("JSON object" if task == "generate" else "inputs") in str(answer)


@pytest.mark.parametrize(
    ("engine_name", "body", "answer"),
    [
        ("Rust", {"inputs": "a b"}, [3.0, 2.0]),
        ("Rust", {"inputs": ["a b"]}, [[3.0, 2.0]]),
        ("OnnxRuntime", ["a b", "xyz"], [[3.0, 2.0], [3.0, 1.0]]),
        ("Python", {"inputs": "a b"}, [[3.0, 2.0]]),
    ],
)
async def test_one_text_is_one_vector_on_lmi_s_other_engines(
    serve: ServeScripted, engine_name: str, body: object, answer: object
) -> None:
    """As its guide to text embedding shows; its Python handler puts it into a list."""
    client = await _client(serve, EMBEDDER, engine=engine_name)
    assert await _ask(client, body) == (200, answer)


async def test_model_of_djl_s_zoo_answers_as_on_these_engines(serve: ServeScripted) -> None:
    """It ran on one, whether or not the engine is named."""
    client = await _client(serve, EMBEDDER, model_id="djl://ai.djl.huggingface.rust/acme/bge")
    assert await _ask(client, {"inputs": "a b"}) == (200, [3.0, 2.0])


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, None),
        ({"truncation": "true"}, -1),
        ({"truncation": "LONGEST_FIRST"}, -1),
        ({"truncation": "false"}, None),
    ],
)
@pytest.mark.parametrize("engine_name", ["Rust", "Python"])
async def test_long_texts_are_cut_where_that_is_asked_for(
    serve: ServeScripted,
    engine: ScriptedEngine,
    options: dict[str, str],
    sent: int | None,
    engine_name: str,
) -> None:
    """Of texts and of pairs, embedded or ranked; a request's own parameter wins."""
    client = await _client(serve, EMBEDDER, engine=engine_name, **options)
    await _ask(client, {"inputs": "a"})
    await _ask(client, {"inputs": "a", "parameters": {"truncate": 5}})
    client = await _client(serve, RANKER, engine=engine_name, **options)
    await _ask(client, PAIR)
    await _ask(client, {"inputs": PAIR, "parameters": {"truncate": 5}})
    await _ask(client, {"inputs": "a"})
    found = [call.body.get("truncate_prompt_tokens") for call in engine.calls]
    assert found == [sent, 5, sent, 5, sent]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"parameters": {"truncate": True}}, "parameters.truncate"),
        ({"parameters": {"normalize": False}}, "parameters.normalize"),
        ({"parameters": {"dimensions": 4}}, "parameters.dimensions"),
        ({"parameters": 3}, "parameters"),
        ({"stream": True}, "stream"),
    ],
)
async def test_parameters_beside_a_pair_count_or_are_refused(
    serve: ServeScripted, fields: dict[str, object], words: str
) -> None:
    """By name, as beside every other payload."""
    status, answer = await _ask(await _client(serve, RANKER), {**PAIR, **fields})
    assert status == 424
    assert words in str(answer)


async def test_length_beyond_the_model_s_cuts_there(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """What asks for more tokens than the model takes is refused by vLLM, short or not."""
    client = await _client(serve, EMBEDDER, engine="Rust", truncation="true")
    (answer,) = client.app[SERVICE].runtime.steps.answers
    step = answer.__self__  # type: ignore[attr-defined]
    step._asked = step._asked.model_copy(update={"max_length": 10**8})
    await _ask(client, {"inputs": "a"})
    assert engine.calls[-1].body["truncate_prompt_tokens"] == engine.max_model_len
