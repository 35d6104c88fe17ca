import json
import math
from typing import Any

import pytest

from lmi_vllm.inference.request.lmi import LmiRequest, parse_lmi_request
from lmi_vllm.inference.request.sampling import Candidates
from lmi_vllm.inference.response.formatters import (
    LMI_SCHEMA,
    TGI_SCHEMA,
    Schema,
    StreamFormatter,
    choose_framing,
    encode_results,
    finish_reason,
    format_result,
    rank_candidates,
)
from lmi_vllm.messages import (
    FRAMINGS,
    BeamSearch,
    GeneratedToken,
    GenerationChunk,
    ServingProfile,
    TokenLogprob,
)

A = GeneratedToken(5, " a", -0.5)
B = GeneratedToken(9, " b", -0.25)

# Accept, output_formatter, tgi_compat -> framing of a stream (docs/answers.md#framings).
CHOICES = {
    "unset": ("", None, False, "jsonlines"),
    "unset, tgi": ("", None, True, "sse"),
    "json": ("", "json", False, "jsonlines"),
    "json, tgi": ("", "json", True, "sse"),
    "jsonlines": ("", "jsonlines", False, "jsonlines"),
    "jsonlines, tgi": ("", "jsonlines", True, "jsonlines"),
    "sse": ("", "sse", False, "sse"),
    "none": ("", "none", False, "jsonlines"),
    "3p": ("", "3p", False, "jsonlines"),
    "3p_stream": ("", "3p_stream", False, "jsonlines"),
    "Accept sse": ("text/event-stream", None, False, "sse"),
    "Accept sse over jsonlines": ("text/event-stream", "jsonlines", False, "sse"),
    "Accept jsonlines over sse": ("application/jsonlines", "sse", False, "jsonlines"),
    "Accept jsonlines over tgi": ("application/jsonlines", None, True, "jsonlines"),
    "Accept any": ("*/*", "sse", False, "sse"),
    "Accept json": ("application/json", "sse", False, "sse"),
    "Accept json, tgi": ("application/json", None, True, "sse"),
    "Accept list, first known": (
        "text/html, application/jsonlines;q=0.1",
        "sse",
        False,
        "jsonlines",
    ),
    "Accept in capitals": ("TEXT/EVENT-STREAM; charset=utf-8", None, False, "sse"),
    "Accept nonsense": (",;;,", None, False, "jsonlines"),
}


@pytest.mark.parametrize(("accept", "formatter", "tgi", "name"), CHOICES.values(), ids=CHOICES)
def test_formatters_choice(accept: str, formatter: str | None, tgi: bool, name: str) -> None:
    """Accept chooses before output_formatter, and the mode decides the rest."""
    assert choose_framing(accept, formatter, tgi_compat=tgi) is FRAMINGS[name]


REASONS = {
    "length": ("length", None, "length"),
    "own end token": ("stop", None, "eos_token"),
    "stop text": ("stop", ".", "stop_sequence"),
    "stop token": ("stop", 13, "stop_sequence"),
    "stop token zero": ("stop", 0, "stop_sequence"),
    "abort": ("abort", None, "abort"),
    "error": ("error", None, "error"),
    "repetition": ("repetition", "repetition_detected", "stop_sequence"),
}


@pytest.mark.parametrize(("reason", "stop", "ours"), REASONS.values(), ids=REASONS)
def test_formatters_finish_reasons(reason: str, stop: str | int | None, ours: str) -> None:
    """The two fields of vLLM become LMI's one word."""
    assert finish_reason(GenerationChunk(0, (), "", reason, stop)) == ours


def candidate(index: int, logprob: float | None) -> GenerationChunk:
    """Return a finished candidate of that probability."""
    return GenerationChunk(index, (A,), str(index), "stop", cumulative_logprob=logprob)


RANKINGS: dict[str, tuple[list[float | None], int, list[int]]] = {
    "best first": ([-3.0, -1.0, -2.0], 3, [1, 2, 0]),
    "only n": ([-3.0, -1.0, -2.0], 2, [1, 2]),
    "only the best": ([-3.0, -1.0, -2.0], 1, [1]),
    "equal: in order": ([-1.0, -1.0], 2, [0, 1]),
    "impossible is last": ([-math.inf, -9.0], 2, [1, 0]),
    "one, unknown": ([None], 1, [0]),
}


@pytest.mark.parametrize(("logprobs", "returned", "order"), RANKINGS.values(), ids=RANKINGS)
def test_formatters_candidates_are_ranked(
    logprobs: list[float | None], returned: int, order: list[int]
) -> None:
    """The most probable sequence is the answer."""
    given = [candidate(index, value) for index, value in enumerate(logprobs)]
    assert [chunk.index for chunk in rank_candidates(given, Candidates(3, returned))] == order


def test_formatters_beams_keep_their_order() -> None:
    """A beam search ranks by its length penalty: its order stands, not the probability's."""
    given = [candidate(1, -1.0), candidate(0, -3.0), candidate(2, -2.0)]
    ranked = rank_candidates(given, Candidates(3, 2, BeamSearch(3)))
    assert [chunk.index for chunk in ranked] == [0, 1]


def request(profile: ServingProfile | None = None, **payload: Any) -> LmiRequest:
    """Return the request of a payload over the prompt p."""
    return parse_lmi_request({"inputs": "p", **payload}, profile or ServingProfile())


def streamed(chunks: list[GenerationChunk], schema: Schema, **payload: Any) -> list[Any]:
    """Return the rows of a stream, decoded."""
    profile = ServingProfile(tgi_compat=schema is TGI_SCHEMA)
    parsed = request(profile, stream=True, **payload)
    formatter = StreamFormatter(parsed, "p", schema, FRAMINGS["jsonlines"])
    lines = b"".join(formatter.rows(chunk) for chunk in chunks).splitlines()
    return [json.loads(line) for line in lines]


SPLITS: dict[str, list[GenerationChunk]] = {
    "a token each": [GenerationChunk(0, (A,), " a"), GenerationChunk(0, (B,), " b", "length")],
    "all at once": [GenerationChunk(0, (A, B), " a b", "length")],
    "empty steps between": [
        GenerationChunk(0, (), ""),
        GenerationChunk(0, (A,), " a"),
        GenerationChunk(0, (), ""),
        GenerationChunk(0, (B,), " b", "length"),
    ],
}


@pytest.mark.parametrize("schema", [LMI_SCHEMA, TGI_SCHEMA], ids=["lmi", "tgi"])
@pytest.mark.parametrize("chunks", SPLITS.values(), ids=SPLITS)
def test_formatters_rows_do_not_depend_on_steps(
    chunks: list[GenerationChunk], schema: Schema
) -> None:
    """However the engine splits its answer, each token is one row and the last one ends it."""
    rows = streamed(chunks, schema)
    assert [row["token"]["id"] for row in rows] == [5, 9]
    assert [row.get("generated_text") for row in rows] == [None, " a b"]
    assert "".join(row["token"]["text"] for row in rows) == rows[-1]["generated_text"]


def test_formatters_empty_last_step_ends_stream() -> None:
    """An aborted sequence may end without a token; its count and text are still exact."""
    chunks = [GenerationChunk(0, (A,), " a"), GenerationChunk(0, (), "", "abort")]
    rows = streamed(chunks, LMI_SCHEMA, parameters={"details": True})
    assert "token" not in rows[-1]
    assert rows[-1]["generated_text"] == " a"
    assert rows[-1]["details"]["finish_reason"] == "abort"
    assert rows[-1]["details"]["generated_tokens"] == 1


def test_formatters_stream_details_have_no_tokens() -> None:
    """The fields of the last row's details are those of the specification, in its order."""
    (row,) = streamed(
        [GenerationChunk(0, (A,), " a", "stop", prompt_tokens=4)],
        LMI_SCHEMA,
        parameters={"details": True, "seed": "3"},
    )
    assert row["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 1,
        "inputs": "p",
        "seed": 3,
        "input_length": 4,
    }


def test_formatters_full_text_is_prompt_and_answer() -> None:
    """return_full_text puts the prompt before the text of every sequence, never into tokens."""
    parsed = request(parameters={"n": 2, "do_sample": True, "return_full_text": True})
    result = format_result(parsed, "p", [candidate(1, -1.0), candidate(2, -2.0)], LMI_SCHEMA)
    (other,) = result["details"]["best_of_sequences"]
    assert (result["generated_text"], other["generated_text"]) == ("p1", "p2")
    assert [token["text"] for token in result["details"]["tokens"]] == [" a"]


def test_formatters_other_sequences_have_the_asked_details() -> None:
    """The keys prefill and top_tokens are in the other sequences too, where they were asked for."""
    top = GeneratedToken(5, " a", -0.5, top=(TokenLogprob(5, " a", -0.5),))
    chunk = GenerationChunk(0, (top,), " a", "stop", prompt_logprobs=(TokenLogprob(3, "p", -1.0),))
    asked = {"details": True, "decoder_input_details": True, "top_n_tokens": 1}
    parsed = request(parameters={"n": 2, "do_sample": True, **asked})
    details = format_result(parsed, "p", [chunk, chunk], LMI_SCHEMA)["details"]
    (other,) = details["best_of_sequences"]
    same = ("finish_reason", "generated_tokens", "tokens", "prefill", "top_tokens")
    assert {name: other[name] for name in same} == {name: details[name] for name in same}
    assert set(other) == {*same, "generated_text"}


def test_formatters_no_details_unasked() -> None:
    """A plain answer is its text and nothing else."""
    assert format_result(request(), "p", [candidate(0, None)], LMI_SCHEMA) == {
        "generated_text": "0"
    }


SHAPES = {
    "one": (False, LMI_SCHEMA, b'{"t":1}\n'),
    "list": (True, LMI_SCHEMA, b'[{"t":1}]\n'),
    "tgi one": (False, TGI_SCHEMA, b'[{"t":1}]\n'),
    "tgi list": (True, TGI_SCHEMA, b'[{"t":1}]\n'),
}


@pytest.mark.parametrize(("is_list", "schema", "body"), SHAPES.values(), ids=SHAPES)
def test_formatters_body_is_object_or_array(is_list: bool, schema: Schema, body: bytes) -> None:
    """A list gives an array, TGI mode always does, all else is one object."""
    assert encode_results([{"t": 1}], is_list=is_list, schema=schema) == body


TOKENS = {
    "lmi": (LMI_SCHEMA, {"id": 5, "text": " a", "log_prob": -0.5, "logprob": -0.5}),
    "tgi": (TGI_SCHEMA, {"id": 5, "text": " a", "logprob": -0.5, "special": False}),
}


@pytest.mark.parametrize(("schema", "token"), TOKENS.values(), ids=TOKENS)
def test_formatters_token_shape(schema: Schema, token: dict[str, Any]) -> None:
    """The two dialects spell a token differently, key order included."""
    assert list(schema.token(A).items()) == list(token.items())
