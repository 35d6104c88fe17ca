"""Which prompts are tokenized on the event loop, and which on vLLM's thread."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.engine.vllm.workarounds.text_lengths import (
    SHORT,
    ShortPrompts,
    render_text,
    tokenize_short_prompts_here,
)


class Renderer:
    """A renderer's two ways; its thread waits until it may go on."""

    def __init__(self, *, is_fast: bool = True) -> None:
        self.tokenizer = SimpleNamespace(is_fast=is_fast)
        self.may_go = asyncio.Event()
        self._tokenize_prompt_async: Callable[..., Any] = self.in_thread

    def _tokenize_prompt(self, prompt: dict[str, str], _: object) -> str:
        return f"here {prompt['prompt'][:5]}"

    async def in_thread(self, prompt: dict[str, str], _: object) -> str:
        """Tokenize later."""
        await self.may_go.wait()
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
        return str(await self._tokenize_prompt_async({"prompt": text}, None))


async def test_short_prompt_stays_here_and_a_long_one_does_not() -> None:
    """Up to the bound."""
    renderer = Renderer()
    tokenize_short_prompts_here(renderer)
    renderer.may_go.set()
    assert await renderer.ask("x" * SHORT) == "here xxxxx"
    assert await renderer.ask("x" * (SHORT + 1)) == "thread xxxxx"


async def test_short_prompt_waits_behind_the_thread_s() -> None:
    """The loop and a thread use no tokenizer at once, also after a failure there."""
    renderer = Renderer()
    tokenize_short_prompts_here(renderer)
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
    tokenize_short_prompts_here(renderer)
    assert await render_text(renderer, prompt, None) == rendered


@pytest.mark.parametrize(
    "renderer", [Renderer(is_fast=False), SimpleNamespace(tokenizer=None)], ids=["slow", "none"]
)
def test_renderer_without_a_fast_tokenizer_is_left_alone(renderer: Any) -> None:
    """A slow one could hold the loop."""
    tokenize_short_prompts_here(renderer)
    assert not isinstance(getattr(renderer, "_tokenize_prompt_async", None), ShortPrompts)
