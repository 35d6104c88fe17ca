"""A text that begins with BOS: two as in vLLM, with a warning; one with `option.single_bos`."""

import logging
from dataclasses import replace
from typing import Any

import orjson
import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm.prompt_starts import PromptStarts
from lmi_vllm.messages import GenerationJob, OpenAICall
from tests.contract.conftest import LoopThread, collect

pytestmark = pytest.mark.vllm
TEXT = "<s>Once upon"


def counted(run: LoopThread, engine: Engine, text: str, **more: Any) -> list[int]:
    """Return how many tokens a prompt has: on LMI's lane, on completions."""
    job = GenerationJob("bos", text, {"max_tokens": 1}, **more)
    body = {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": job.truncate_prompt_tokens}
    reply = run(engine.answer_openai(OpenAICall("completions", body, {}, "bos")))
    usage = orjson.loads(reply.body)["usage"]
    return [run(collect(engine, job))[-1].prompt_tokens, usage["prompt_tokens"]]


@pytest.mark.parametrize("rest", ["", " a time" * 200], ids=["short", "long"])
def test_text_with_bos_has_one_or_two(
    run: LoopThread,
    vllm_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rest: str,
) -> None:
    """On both lanes, and where a prompt is long enough for another thread."""
    renderer: Any = vllm_engine._llm.renderer  # type: ignore[attr-defined]
    guard, tokenizer = renderer.tokenize_prompt_async, renderer.tokenizer
    one = len(tokenizer.encode(f"{TEXT}{rest}", add_special_tokens=False))
    monkeypatch.setattr(guard, "starts", PromptStarts(tokenizer, leaves_one=False))
    with caplog.at_level(logging.WARNING):
        assert counted(run, vllm_engine, TEXT + rest) == [one + 1, one + 1]
    assert [text for text in caplog.messages if "option.single_bos=true" in text] == [
        "a prompt begins with <s>, and the tokenizer puts another one before it: "
        "option.single_bos=true leaves one, and so do messages, or "
        '"add_special_tokens": false on /v1/completions'
    ]
    monkeypatch.setattr(guard, "starts", PromptStarts(tokenizer, leaves_one=True))
    assert counted(run, vllm_engine, TEXT + rest) == [one, one]
    tokens = run(vllm_engine.tokenize(TEXT + rest, add_special_tokens=True))
    assert [token.id for token in tokens] == tokenizer.encode(TEXT + rest, add_special_tokens=False)
    plain = TEXT.removeprefix("<s>") + rest
    assert counted(run, vllm_engine, plain) == [len(tokenizer.encode(plain))] * 2


def test_cut_text_with_bos_begins_with_one(vllm_engine: Engine) -> None:
    """The tokenizer's own, since that of the text may be cut."""
    renderer: Any = vllm_engine._llm.renderer  # type: ignore[attr-defined]
    starts = PromptStarts(renderer.tokenizer, leaves_one=True)
    params = replace(renderer.default_cmpl_tok_params, truncate_prompt_tokens=5)
    assert starts.read({"prompt": TEXT}, params) == ({"prompt": "Once upon"}, params)


class Tokenizer:
    """One that puts other tokens than BOS, or none."""

    bos_token, bos_token_id = "<s>", 0

    def __init__(self, *added: int) -> None:
        self.added = added

    def encode(self, text: str) -> list[int]:
        """Return what it puts, and BOS where it reads it."""
        return [*self.added, *([0] if text else [])]


@pytest.mark.parametrize("added", [(), (0, 2), (5,)])
def test_other_tokenizers_are_left_alone(added: tuple[int, ...]) -> None:
    """Their special tokens are wanted, or there is one BOS only."""
    params: Any = type("Params", (), {"add_special_tokens": True})
    starts = PromptStarts(Tokenizer(*added), leaves_one=True)
    assert starts.read({"prompt": TEXT}, params)[1] is params
