"""Every token that ends a model's answers is an end token, whatever file names it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm.configuration import engine_config
from lmi_vllm.engine.vllm.jobs import JobRunner, end_tokens
from lmi_vllm.errors import EngineStartError
from lmi_vllm.inference.response.formatters import finish_reason
from lmi_vllm.messages import GenerationChunk, GenerationJob
from tests.contract.conftest import LoopThread, collect
from tests.contract.test_direct_tokens import Reader
from tests.contract.vllm_configuration import engine_arguments
from tests.support.vllm_namespace import namespace_of

pytestmark = pytest.mark.vllm
PROMPT: Final = "Once upon a time"
GREEDY: Final = {"temperature": 0.0, "max_tokens": 40}
KEPT: Final = {"include_stop_str_in_output": True}  # as in TGI mode
# Sampling -> LMI's finish reason, and whether the end token has its text.
ENDED: Final[dict[str, tuple[dict[str, object], str, bool]]] = {
    "as it is": ({}, "eos_token", False),
    "stop strings kept": (KEPT, "eos_token", False),
    "special tokens shown": ({**KEPT, "skip_special_tokens": False}, "eos_token", True),
    "another stop token": ({**KEPT, "stop_token_ids": [7]}, "eos_token", False),
    "ignored": ({"ignore_eos": True, "max_tokens": 7}, "length", True),
    "ignored, but asked for": ({**KEPT, "ignore_eos": True}, "stop_sequence", True),
}


async def all_chunks(
    runner: JobRunner, job: GenerationJob, reader: Reader | None
) -> list[GenerationChunk]:
    """Return the chunks of a job in order; a reader takes those between the first and the last."""
    found = []
    async for chunk in runner.generate(job, reader):
        if reader is not None:
            found, reader.chunks = [*found, *reader.chunks], []
            reader.is_first_over = True
        found.append(chunk)
    return found


@pytest.mark.parametrize("form", ["whole", "streamed", "to a reader"])
@pytest.mark.parametrize("name", ENDED)
def test_end_tokens_of_the_generation_config_are_the_model_s(
    run: LoopThread, vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    """They are no stop sequence, and have a text only where special tokens have one."""
    engine: Any = vllm_engine
    (plain,) = run(collect(vllm_engine, GenerationJob("plain", PROMPT, GREEDY)))
    ids = [token.id for token in plain.tokens]
    place = next(place for place in range(4, 40) if ids.index(ids[place]) == place)
    end = ids[place]
    fields = {"eos_token_id": [1, end]}
    monkeypatch.setattr(engine._llm.input_processor, "generation_config_fields", fields)
    sampling, reason, is_shown = ENDED[name]
    asked = {**GREEDY, **sampling}
    if reason == "length":
        asked["max_tokens"] = place + 1
    if reason == "stop_sequence":
        asked["stop_token_ids"] = [end]
    job = GenerationJob("ends", PROMPT, asked, is_streaming=form != "whole")
    reader = Reader() if form == "to a reader" else None
    found = run(all_chunks(JobRunner(engine._llm, engine._openai), job, reader))
    tokens = [token for chunk in found for token in chunk.tokens]
    text = "".join(token.text for token in plain.tokens[: place + is_shown])
    assert finish_reason(found[-1]) == reason
    assert [token.id for token in tokens] == ids[: place + 1]
    assert "".join(chunk.text for chunk in found) == text
    assert "".join(token.text for token in tokens) == text


def test_the_tokenizer_s_own_end_is_one_as_before(run: LoopThread, vllm_engine: Engine) -> None:
    """Without any in the generation config, too."""
    assert end_tokens({}, vllm_engine.tokenizer) == {1}  # type: ignore[attr-defined]
    assert end_tokens({"eos_token_id": 5}, None) == {5}
    asked = {"temperature": 0.0, "max_tokens": 300, **KEPT}
    (chunk,) = run(collect(vllm_engine, GenerationJob("end", "The capital of France is", asked)))
    assert (finish_reason(chunk), chunk.tokens[-1].id, chunk.tokens[-1].text) == (
        "eos_token",
        1,
        "",
    )
    shown = replace(
        GenerationJob("end", "The capital of France is", asked),
        sampling={**asked, "skip_special_tokens": False},
    )
    (chunk,) = run(collect(vllm_engine, shown))
    assert chunk.tokens[-1].text == "</s>" == chunk.text[-4:]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', and an id or a list of ids is needed"),
        ({"eos_token_id": [2, "</s>"]}, "eos_token_id is [2, '</s>']"),
        ({"eos_token_id": 2.0}, "eos_token_id is 2.0"),
        ({"temperature": "0.5"}, "temperature is '0.5', and a number is needed"),
        ({"top_k": 50.0}, "top_k is 50.0, and a whole number is needed"),
    ],
)
def test_defaults_that_no_request_could_carry_end_the_start(
    tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    """With a text as the end token vLLM's engine took no request, and the start had no end."""
    arguments = engine_arguments("", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(EngineStartError, match=re.escape(said)):
        engine_config(namespace_of(arguments.values), 1, 0, is_cpu=True)


@pytest.mark.parametrize("ends", [None, 2, [2, 0], 0])
def test_end_tokens_that_requests_carry_are_taken(tmp_path: Path, ends: object) -> None:
    """One id, several or none."""
    arguments = engine_arguments("", tmp_path)
    fields = {"eos_token_id": ends, "temperature": 0.5, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert engine_config(namespace_of(arguments.values), 1, 0, is_cpu=True)
