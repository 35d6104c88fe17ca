"""No field of a request that reaches the engine's process ends it, or changes another answer.

vLLM checks most fields where a request arrives. Others are read by the engine's own step, where an
exception ends every request. Each row is sent beside the stream of another client.
"""

import base64
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from integration.client import OpenStream, call
from integration.conftest import RunningServer, running_server
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.hostile_values import (
    COMBINED,
    CONSTRAINTS,
    DIGITS,
    EXTREMES,
    HUGE,
    SAMPLING,
    WORDS,
    hostile_bodies,
)

pytestmark = pytest.mark.vllm
HONEST = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 300}, "stream": True}
GENERATE, COMPLETIONS, LMI = "/inference/v1/generate", "/v1/completions", "/invocations"
CHAT = "/v1/chat/completions"
# Of the parser k2_horizon; those of the effort "low" are missing.
THOUGHT = ("<ifm|think>", "</ifm|think>", "<ifm|think_fast>", "</ifm|think_fast>")


def generated(sampling: Mapping[str, object] | None = None, **fields: object) -> dict[str, Any]:
    """Return the body of a request with token ids."""
    return {
        "token_ids": [50, 60],
        "sampling_params": {"max_tokens": 4, **(sampling or {})},
        **fields,
    }


def thinking(effort: object) -> dict[str, Any]:
    """Return a request with a grammar, and with this effort."""
    fields = {"chat_template_kwargs": {"reasoning_effort": effort}}
    return generated({"structured_outputs": DIGITS}, reasoning_parser_kwargs=fields)


def embedded(*shape: int, kind: str = "float32", fill: float = 0.0) -> dict[str, Any]:
    """Return a request whose prompt is a tensor."""
    import torch  # noqa: PLC0415 (slow)

    written = io.BytesIO()
    torch.save(torch.full(shape, fill, dtype=getattr(torch, kind)), written)
    text = base64.b64encode(written.getvalue()).decode()
    return {"prompt_embeds": text, "max_tokens": 4}


PICTURE = {
    "mm_hashes": {"image": ["a"]},
    "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
}
FIELDS: dict[str, list[Any]] = {
    "token_ids": [[HUGE], [2**31], [1280], [-1], []],
    "priority": [2**63 - 1, -(2**63), HUGE],
    "cache_salt": ["\ud800", "\x00", "x" * 1024],
    "request_id": ["\ud800", "", "../x"],
    "kv_transfer_params": [{"do_remote_prefill": True, "remote_block_ids": "x"}, {"x": HUGE}],
    "ec_transfer_params": [{"x": 1}],
    "features": [PICTURE, {"mm_hashes": {}, "mm_placeholders": {}}],
    "content_parts": [[{"type": "image_url", "url": "data:,x", "uuid": "x"}]],
    "reasoning_ended": [True, False],
}
TENSORS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 127), {}),
    ((0, 128), {}),
    ((1, 2, 128), {}),
    ((2, 128), {"kind": "int64"}),
    ((2, 128), {"fill": 1e30}),
    ((2, 128), {"fill": float("nan")}),
    ((2, 128), {"fill": float("inf")}),
    ((2, 128), {"kind": "float64", "fill": 1e300}),
)
TALK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def hostile() -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield a field, the path and the bodies of its requests."""
    yield "effort", GENERATE, [thinking(one) for one in ("high", "", None, ["high"], {"a": 1})]
    for name, values in SAMPLING.items():
        yield name, GENERATE, [generated({name: one}) for one in values]
    for name, values in FIELDS.items():
        yield name, GENERATE, [generated(None, **{name: one}) for one in values]
    for name, one in WORDS.items():
        yield f"{name} of a chat", CHAT, [{**TALK, name: one}]
    for name, bodies in hostile_bodies():
        yield f"{name} of a text", COMPLETIONS, bodies
    for name, values in SAMPLING.items():
        yield f"{name} of LMI", LMI, [parameters(**{name: one}) for one in values]
    yield "combined", GENERATE, [generated(one) for one in COMBINED]
    yield "combined of LMI", LMI, [parameters(**one) for one in COMBINED]
    yield "constraints", LMI, [parameters(structured_outputs=one) for one in CONSTRAINTS]
    yield "parameters", LMI, [parameters(**{name: one}) for name, one in EXTREMES.items()]


def parameters(**given: object) -> dict[str, Any]:
    """Return LMI's request with these."""
    return {"inputs": "x", "parameters": {"max_new_tokens": 4, **given}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model with tokens of the parser, and with the routes for token ids."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    folder = tmp_path_factory.mktemp("hostile")
    model = shutil.copytree(DEMO_MODEL_DIR, folder / "model")
    _rename_tokens(model / "tokenizer.json")
    environ = {
        "OPTION_REASONING_PARSER": "k2_horizon",
        "OPTION_ENABLE_SCALE_OUT": "true",
        "OPTION_ENABLE_PROMPT_EMBEDS": "true",
        "OPTION_SCHEDULING_POLICY": "priority",
        "SERVING_RETRY_THRESHOLD": "0",  # an engine that ends is not replaced
    }
    with running_server(folder, "--model", str(model), environ=environ) as server:
        yield server


def _rename_tokens(path: Path) -> None:
    """Give the last tokens of the vocabulary the names that the parser looks for."""
    tokenizer = json.loads(path.read_bytes())
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    names = {number: name for name, number in vocabulary.items()}
    for number, name in enumerate(THOUGHT, len(vocabulary) - len(THOUGHT)):
        vocabulary[name] = vocabulary.pop(names[number])
        added.append({**added[-1], "id": number, "content": name})
    merges = tokenizer["model"]["merges"]
    whole = [one if isinstance(one, str) else " ".join(one) for one in merges]
    kept = [
        one for one, text in zip(merges, whole, strict=True) if text.replace(" ", "") in vocabulary
    ]
    tokenizer["model"]["merges"] = kept
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


@pytest.fixture(scope="module")
def alone(server: RunningServer) -> bytes:
    """The bytes of the honest stream on a server that does nothing else."""
    return OpenStream(server.url, LMI, HONEST).rest()


ROWS = (*hostile(),)


@pytest.mark.parametrize(("name", "path", "bodies"), ROWS, ids=[row[0] for row in ROWS])
def test_hostile_field_harms_no_other_request(
    server: RunningServer, alone: bytes, name: str, path: str, bodies: list[dict[str, Any]]
) -> None:
    """They are answered or refused; the stream beside them has the bytes that it has alone."""
    stream = OpenStream(server.url, LMI, HONEST)
    statuses = [call(server.url, path, body, seconds=30).status for body in bodies]
    assert stream.rest() == alone
    assert max(statuses) < 500, statuses


def test_hostile_prompt_embeds_harm_no_other_request(server: RunningServer, alone: bytes) -> None:
    """Of another shape or type they are refused; numbers that are not finite end the request."""
    stream = OpenStream(server.url, LMI, HONEST)
    asked: list[dict[str, Any]] = [{"prompt_embeds": "AAAA", "max_tokens": 4}]
    asked += [embedded(*shape, **options) for shape, options in TENSORS]
    statuses = [call(server.url, COMPLETIONS, body, seconds=30).status for body in asked]
    assert stream.rest() == alone
    assert statuses == [400, 400, 400, 200, 400, 200, 500, 500, 500]  # a batch of one is one


@pytest.mark.parametrize("effort", ["low", "none", 5])
def test_reasoning_that_the_parser_cannot_read_is_refused(
    server: RunningServer, alone: bytes, effort: object
) -> None:
    """For each, vLLM's engine would end with all requests; without a grammar it does not ask."""
    stream = OpenStream(server.url, LMI, HONEST)
    answer = call(server.url, GENERATE, thinking(effort), seconds=30)
    assert answer.status == 400
    assert "reasoning parser" in answer.json()["error"]["message"]
    assert stream.rest() == alone


@pytest.mark.parametrize("name", ["kwargs_data", "mm_metadata"])
@pytest.mark.parametrize("packed", ["AAAA", "", "kA==", "gaFhAQ==", "\u00e9", "!"])
def test_media_that_are_no_packed_tensors_are_refused_by_name(
    server: RunningServer, name: str, packed: str
) -> None:
    """Some were 500, "'int' object has no attribute 'items'", and no answer named the field."""
    features = {**PICTURE, name: {"image": [packed]}}
    body = generated(None, features=features, ec_transfer_params={"x": 1})
    answer = call(server.url, GENERATE, body)
    assert answer.status == 400
    assert answer.json()["error"]["message"].startswith(f"features.{name}.image[0]: ")


KINDS = ["NaN", 3, [], True, {"json": 3}, {"regex": ["a"]}, {"choice": "a"}, {"grammar": 1}]


@pytest.mark.parametrize("path", [LMI, COMPLETIONS, CHAT, f"{CHAT}/render"])
@pytest.mark.parametrize("given", KINDS, ids=str)
def test_constraint_of_a_wrong_kind_is_refused_by_name(
    server: RunningServer, path: str, given: object
) -> None:
    """It said "'str' object has no attribute 'get'", or named a class of vLLM's."""
    base: dict[str, Any] = TALK if "chat" in path else {"prompt": "x"}
    body = {**base, "structured_outputs": given}
    answer = call(server.url, path, parameters(structured_outputs=given) if path == LMI else body)
    assert answer.status == (424 if path == LMI else 400)
    field = f"structured_outputs.{next(iter(given))}" if isinstance(given, dict) else (
        "structured_outputs: expected an object"
    )  # fmt: skip
    assert field in answer.body.decode()
    assert "object has no attribute" not in answer.body.decode()
    assert "StructuredOutputsParams" not in answer.body.decode()
