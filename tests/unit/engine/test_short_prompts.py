"""Which prompts are tokenized on the event loop, and which on vLLM's thread."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.engine.vllm.workarounds.text_lengths import (
    MOST_IN_A_TURN,
    SHORT,
    guard_lengths,
    render_text,
)

PARAMS = SimpleNamespace(max_total_tokens=None, truncate_prompt_tokens=None)


class Renderer:
    """A renderer's two ways; its thread waits until it may go on."""

    def __init__(self, *, is_fast: bool = True) -> None:
        self.tokenizer = SimpleNamespace(
            is_fast=is_fast, truncation_side="right", max_chars_per_token=9
        )
        self.seen = ""
        self.config = SimpleNamespace(ec_transfer_config=None)
        self.may_go = asyncio.Event()
        self.tokenize_prompt_async: Callable[..., Any] = self.in_thread
        guard_lengths(self, 5000)

    def tokenize_prompt(self, prompt: dict[str, str], _: object) -> str:
        """Tokenize now."""
        return f"here {prompt['prompt'][:5]}"

    async def in_thread(self, prompt: dict[str, str], _: object) -> str:
        """Tokenize later."""
        await self.may_go.wait()
        self.seen = prompt["prompt"]
        if prompt["prompt"] == "bad":
            raise ValueError("bad prompt")
        return f"thread {prompt['prompt'][:5]}"

    def render_cmpl(self, prompts: list[Any], _: object) -> list[str]:
        """Render without a task."""
        return ["at once" for _ in prompts]

    async def render_cmpl_async(self, prompts: list[Any], _: object) -> list[str]:
        """Render with the thread's help."""
        return ["later" for _ in prompts]

    async def ask(self, text: str) -> str:
        """Tokenize a prompt as vLLM does."""
        return str(await self.tokenize_prompt_async({"prompt": text}, PARAMS))


async def test_short_prompt_stays_here_and_a_long_one_does_not() -> None:
    """Up to the bound."""
    renderer = Renderer()
    renderer.may_go.set()
    assert await renderer.ask("x" * SHORT) == "here xxxxx"
    assert await renderer.ask("x" * (SHORT + 1)) == "thread xxxxx"


async def test_characters_count_by_their_bytes() -> None:
    """Of emoji each is a token or more: 900 prompts of them held the loop for 1.9 s."""
    renderer = Renderer()
    renderer.may_go.set()
    assert (await renderer.ask("\U0001f600" * (SHORT // 4))).startswith("here")
    assert (await renderer.ask("\U0001f600" * (SHORT // 4 + 1))).startswith("thread")
    assert (await renderer.ask("\ud800")).startswith("here")


async def test_many_short_prompts_at_once_go_to_the_thread() -> None:
    """Those beyond a turn's bound; in the next turn there is room again."""
    renderer = Renderer()
    renderer.may_go.set()
    asked = await asyncio.gather(*(renderer.ask("x" * SHORT) for _ in range(100)))
    assert [one.startswith("here") for one in asked].count(True) == MOST_IN_A_TURN // SHORT
    assert (await renderer.ask("x" * SHORT)).startswith("here")


TRUNCATED = {
    "asked for": ({"truncate_prompt_tokens": 5}, "right"),
    "to the context": ({"truncate_prompt_tokens": -1}, "right"),
    "on the left": ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, "left"),
}


@pytest.mark.parametrize(("fields", "side"), TRUNCATED.values(), ids=TRUNCATED)
async def test_truncated_text_is_cut_before_it_is_tokenized(
    fields: dict[str, Any], side: str
) -> None:
    """The part that its tokens come from is left; offsets of another beginning would be wrong."""
    renderer = Renderer()
    renderer.may_go.set()
    given = {"truncation_side": None, "return_token_offsets": False, "max_truncation_tokens": 9}
    params = SimpleNamespace(max_total_tokens=10, **given | fields)
    text = "a" + "b" * 8_000_000 + "c"
    await renderer.tokenize_prompt_async({"prompt": text}, params)
    assert len(renderer.seen) < 40_000
    assert renderer.seen == (text[: len(renderer.seen)] if side == "right" else
                             text[-len(renderer.seen) :])  # fmt: skip
    params.return_token_offsets = True
    await renderer.tokenize_prompt_async({"prompt": text}, params)
    assert (len(renderer.seen) == len(text)) == (side == "left")


async def test_short_prompt_waits_behind_the_thread_s() -> None:
    """The loop and a thread use no tokenizer at once, also after a failure there."""
    renderer = Renderer()
    long = asyncio.create_task(renderer.ask("x" * 2000))
    bad = asyncio.create_task(renderer.ask("y" * 2000))
    await asyncio.sleep(0)
    short = asyncio.create_task(renderer.ask("bad"))
    await asyncio.sleep(0)
    assert not short.done()
    bad.cancel()
    renderer.may_go.set()
    assert await long == "thread xxxxx"
    with pytest.raises(ValueError, match="bad prompt"):
        await short
    assert await renderer.ask("short") == "here short"


@pytest.mark.parametrize(
    ("prompt", "rendered"),
    [
        ({"prompt": "x" * SHORT}, "at once"),
        ({"prompt": "x" * (SHORT + 1)}, "later"),
        ({"encoder_prompt": {"prompt": "x"}}, "later"),
    ],
    ids=["short", "long", "two parts"],
)
async def test_short_prompt_needs_no_task_of_vllm(prompt: dict[str, Any], rendered: str) -> None:
    """The blocking way has no thread to wait for; whatever else is in a prompt keeps the other."""
    renderer = Renderer()
    assert await render_text(renderer, prompt, None) == rendered


async def test_slow_tokenizer_keeps_to_its_thread() -> None:
    """It could hold the loop."""
    renderer = Renderer(is_fast=False)
    renderer.may_go.set()
    assert await renderer.ask("short") == "thread short"
    assert await render_text(renderer, {"prompt": "short"}, None) == "later"
