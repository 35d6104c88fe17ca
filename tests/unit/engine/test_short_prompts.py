"""Which prompts are tokenized on the event loop, and which on vLLM's thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.engine.vllm.workarounds.text_lengths import (
    MOST_IN_A_TURN,
    SHORT,
    guard_lengths,
    render_text,
)
from lmi_vllm.telemetry.records import RequestRecord, current_record, enter_record

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


async def test_name_of_a_picture_is_the_client_s_own_where_a_thread_reads_it() -> None:
    """Models that pool: one client's picture answered for another client's of that name."""
    renderer = Renderer()
    found: list[Any] = []
    renderer.process_for_engine = lambda prompt, _: found.append(prompt)  # type: ignore[attr-defined]
    guard_lengths(renderer, 5000)
    enter_record(RequestRecord("", "", "", "", "192.0.2.1", ""))
    renderer.process_for_engine({"multi_modal_uuids": {"image": ["logo"]}}, 0.5)  # type: ignore[attr-defined]
    enter_record(None)
    assert found == [{"multi_modal_uuids": {"image": ["192.0.2.1|logo"]}}]


async def test_threads_of_the_renderer_know_whose_request_it_is() -> None:
    """So that a name of media there is the client's own."""
    with ThreadPoolExecutor(1) as executor:
        renderer = Renderer()
        renderer._executor = executor  # type: ignore[attr-defined]
        guard_lengths(renderer, 5000)
        record = RequestRecord("", "", "", "", "192.0.2.1", "")
        enter_record(record)
        asked = asyncio.get_running_loop().run_in_executor(executor, current_record)
        enter_record(None)
        assert await asked is record


LONG_CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a message": ([{"role": "user", "content": "x" * 40_000}], {}),
    "parts": ([{"role": "user", "content": [{"text": "x" * 20_000}] * 2}], {}),
    "a role": ([{"role": "x" * 40_000}], {}),
    "documents": ([], {"documents": [{"text": "x" * 40_000}]}),
}


@pytest.mark.parametrize(("messages", "more"), LONG_CHATS.values(), ids=LONG_CHATS)
async def test_chat_that_a_template_tokenizes_has_a_bound(
    messages: Any, more: dict[str, Any]
) -> None:
    """Mistral's tokenizers, and enable_prompt_embeds: 5 MB held all other chats for 25 s."""

    async def apply(*_: object, **__: object) -> str:
        return "applied"

    renderer = Renderer()
    renderer.config.model_config = SimpleNamespace(max_model_len=100)
    renderer._apply_chat_template_async = apply  # type: ignore[attr-defined]
    guard_lengths(renderer, 5000)
    bounded = renderer._apply_chat_template_async  # type: ignore[attr-defined]
    assert await bounded(messages, **more) == "applied"  # vLLM's bound comes after it
    with pytest.raises(ValueError, match=r"at most 32768 characters, .*_len\) \(got 40"):
        await bounded("tokenizer", messages, **more, tokenize=True)
    parts = [{"image_url": {"url": "x" * 40_000}}, {"text": "x" * 30_000}]
    short: list[Any] = [{"content": parts}]
    assert await bounded(short, tokenize=True, chat_template="x" * 40_000) == "applied"


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
