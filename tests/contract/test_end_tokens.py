"""Every token that ends a model's answers is an end token, whatever file names it."""

from dataclasses import replace
from typing import Any, Final

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm.jobs import JobRunner, end_tokens
from lmi_vllm.inference.response.formatters import finish_reason
from lmi_vllm.messages import GenerationChunk, GenerationJob
from tests.contract.conftest import LoopThread, collect
from tests.contract.test_direct_tokens import Reader

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
