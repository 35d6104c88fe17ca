"""The Transformers engine lets other requests in between the prompts of a long list."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import Dialect
from lmi_vllm.messages import GenerationJob, OpenAICall
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from tests.contract.conftest import LoopThread, collect, start_t5_engine

pytestmark = pytest.mark.vllm
ROWS, LISTED = 16, 120
MANY = 300  # prompts, each as long as the encoder takes


def job(name: str, prompt: str, tokens: int) -> GenerationJob:
    """Return a greedy job of exactly so many tokens."""
    return GenerationJob(name, prompt, {"max_tokens": tokens, "temperature": 0, "ignore_eos": True})


async def of_one_request(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` as a request of its own, which it is to the engine by its record."""
    enter_record(RequestRecord("list", "POST", "/", "/", "", Dialect.LMI))
    return await work


async def jobs_list(engine: Engine, prompts: list[str], tokens: int) -> None:
    """Ask as `inputs` with a list does: a job for each prompt."""
    await asyncio.gather(*(collect(engine, job("list", one, tokens)) for one in prompts))


async def openai_list(engine: Engine, prompts: list[str], tokens: int) -> None:
    """Ask as `/v1/completions` with a list does."""
    fields = {"prompt": prompts, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    await engine.answer_openai(OpenAICall("completions", fields, {}, "list"))


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, Any]) -> AsyncGenerator[None, None]:
    """Keep `work` running as a request of its own; it is cancelled at the end."""
    task = asyncio.create_task(of_one_request(work))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("ask", [jobs_list, openai_list])
def test_long_list_lets_other_requests_in_between(
    run: LoopThread, t5_folder: Path, ask: Any
) -> None:
    """They waited for whole answers of the list: 26 s beside one of 300 prompts."""
    engine = start_t5_engine(run, t5_folder, max_num_seqs=ROWS)

    async def steps(count: int) -> int:
        before = engine.progress
        await asyncio.gather(*(collect(engine, job("one", "moon", 5)) for _ in range(count)))
        return engine.progress - before

    async def scenario() -> list[int]:
        work = ask(engine, [f"moon {number}" for number in range(LISTED)], 500)
        async with beside(work):
            while engine.running_requests < LISTED:  # noqa: ASYNC110 (the thread has no event)
                await asyncio.sleep(0)
            spent = [await steps(1)]  # while the list's first prompts join
            async with asyncio.timeout(60):
                while engine.progress < ROWS:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            return [*spent, await steps(1), await steps(3)]  # while it has all rows that it gets

    spent = run(scenario())
    run(engine.close())
    assert max(spent) < 30, spent


def test_two_lists_share_the_rows(run: LoopThread, t5_folder: Path) -> None:
    """Of two, the one that came second gets half of what becomes free, not the end of the queue."""
    engine = start_t5_engine(run, t5_folder, max_num_seqs=ROWS)

    async def scenario() -> int:
        first = openai_list(engine, [f"moon {number}" for number in range(LISTED)], 40)
        async with beside(first):
            while engine.running_requests < LISTED:  # noqa: ASYNC110 (the thread has no event)
                await asyncio.sleep(0)
            before = engine.progress
            await openai_list(engine, [f"north {number}" for number in range(ROWS)], 40)
            return engine.progress - before

    spent = run(scenario())
    run(engine.close())
    # Alone it takes 44 steps, behind the first 344.
    assert spent < 200


def test_tokenizer_lets_other_requests_in_between(run: LoopThread, t5_engine: Engine) -> None:
    """A list of `inputs` asked for all of its texts at once: another's waited for all, 2 s."""
    done = 0

    async def counted(prompt: str) -> None:
        nonlocal done
        await t5_engine.tokenize(prompt, add_special_tokens=True)
        done += 1

    async def texts() -> None:
        await asyncio.gather(*(counted("moon " * 600) for _ in range(MANY)))

    async def scenario() -> int:
        async with beside(texts()):
            while not done:  # noqa: ASYNC110 (a counter of this test)
                await asyncio.sleep(0)
            before = done
            await t5_engine.tokenize("moon", add_special_tokens=True)
            return done - before

    assert run(scenario()) <= 3
