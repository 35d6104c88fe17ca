"""A request whose logits are not finite ends with an error, and does not change later answers.

The first test is the defect, with vLLM's own scheduler; each other one was seen red with its guard
taken out.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.workarounds.not_finite import end_not_finite
from lmi_vllm.errors import EngineFailureError
from lmi_vllm.messages import OpenAICall
from tests.contract.adapter_loader import IDS, PROMPT, Loader, job
from tests.contract.conftest import LoopThread, collect, start_demo_engine
from tests.support.adapter_files import make_adapter

pytestmark = pytest.mark.vllm
NOT_A_NUMBER = float("nan")
HUGE = 1e18
# Leaves keys and values where a shorter prompt of the same block ends.
DRAFTED = "red blue red blue red blue red blue red"  # what an n-gram drafter finds again
LONG_PROMPT = "The sea is wide and the wind is cold. Water is a clear liquid. " * 4 + PROMPT


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let harmful weights through: an adapter that was registered before there was a check."""
    monkeypatch.setattr("lmi_vllm.engine.vllm.adapter_files.check_values", lambda *_: None)


@pytest.fixture
def adapters(run: LoopThread, vllm_engine: Any, unchecked: None) -> Iterator[Loader]:
    """Load adapters; the engine is empty and alive afterwards."""
    loader = Loader(run, vllm_engine)
    yield loader
    for ref in loader.loaded:
        loader.unload(ref)


def test_plain_vllm_corrupts_every_later_answer(
    run: LoopThread, unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request to one adapter, and the model itself answers nothing any more."""
    monkeypatch.setattr("lmi_vllm.engine.vllm.configuration.end_not_finite", lambda _: None)
    engine = start_demo_engine(run)
    loader = Loader(run, engine)
    try:
        assert loader.ask()
        bad = loader.load(make_adapter(tmp_path / "bad", 1, NOT_A_NUMBER))
        assert not loader.ask(bad, sampling={"max_tokens": 100, "ignore_eos": True})
        loader.unload(bad)
        assert not any(loader.ask() for _ in range(8))
    finally:
        run(engine.close())


@pytest.mark.parametrize("strength", [NOT_A_NUMBER, HUGE])
def test_adapter_that_is_not_finite_costs_its_own_requests_only(
    adapters: Loader, tmp_path: Path, strength: float
) -> None:
    """Alone and in a batch with others, which get their own answers then and afterwards."""
    good = adapters.load(make_adapter(tmp_path / "good", 3))
    expected = [adapters.ask(), adapters.ask(good)]
    bad = adapters.load(make_adapter(tmp_path / "bad", 1, strength))
    for prompt in (PROMPT, LONG_PROMPT):
        with pytest.raises(EngineFailureError, match="not finite"):
            adapters.ask(bad, prompt, sampling={"max_tokens": 100, "ignore_eos": True})

    async def together() -> list[Any]:
        jobs = [job(ref) for ref in (None, bad, good, bad)]
        work = (collect(adapters.engine, one) for one in jobs)
        return await asyncio.gather(*work, return_exceptions=True)

    base, first, other, second = adapters.run(together())
    assert [base[-1].text, other[-1].text] == expected
    assert {type(first), type(second)} == {EngineFailureError}
    adapters.unload(bad)
    after = [[adapters.ask(), adapters.ask(good)] for _ in range(12)]
    assert after == [expected] * 12
    assert adapters.engine.not_finite == 0


def test_request_that_ends_in_the_step_that_makes_it_not_finite(
    adapters: Loader, tmp_path: Path
) -> None:
    """The engine no longer has it, and yet its blocks are cleared."""
    expected = adapters.ask()
    bad = adapters.load(make_adapter(tmp_path / "bad", 1, NOT_A_NUMBER))

    corrupted = replace(job(bad, 100), prompt=LONG_PROMPT)

    async def disconnect_after(delay: float) -> None:
        with pytest.raises((TimeoutError, EngineFailureError)):
            await asyncio.wait_for(collect(adapters.engine, corrupted), delay)

    for number in range(30):
        adapters.run(disconnect_after(0.002 + number / 2000))
        assert adapters.ask() == expected


def test_openai_calls_end_with_an_error(adapters: Loader, tmp_path: Path) -> None:
    """Whole and as streams, with and without several choices."""
    bad = adapters.load(make_adapter(tmp_path / "bad", 1, NOT_A_NUMBER))

    async def answered(body: dict[str, Any]) -> tuple[int, bytes]:
        request = {"model": bad.name, "prompt": PROMPT, "max_tokens": 8, **body}
        kind = "completions"
        if "messages" in body:
            kind = "chat/completions"
            del request["prompt"]
        call = OpenAICall(kind, request, {}, f"corrupted-{next(IDS)}", bad)
        reply = await adapters.engine.answer_openai(call)
        events = b"" if reply.stream is None else b"".join([one async for one in reply.stream])
        return reply.status, reply.body + events

    status, body = adapters.run(answered({}))
    assert (status, b'"code":500' in body) == (500, True)
    status, body = adapters.run(answered({"n": 2}))
    assert status == 500
    status, body = adapters.run(answered({"stream": True}))
    assert (status, b'"error":' in body) == (200, True)
    turns = [{"role": "user", "content": PROMPT}]
    status, body = adapters.run(answered({"stream": True, "messages": turns}))
    assert (status, b'"error":' in body) == (200, True)


def test_beam_search_ends_with_an_error(adapters: Loader, tmp_path: Path) -> None:
    """A beam search has no beam left."""
    bad = adapters.load(make_adapter(tmp_path / "bad", 1, NOT_A_NUMBER))
    body = {"model": bad.name, "prompt": PROMPT, "max_tokens": 8, "use_beam_search": True, "n": 2}
    call = OpenAICall("completions", body, {}, f"corrupted-{next(IDS)}", bad)
    assert adapters.run(adapters.engine.answer_openai(call)).status == 500


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_decoding_ends_only_the_not_finite_request(
    run: LoopThread,
    unchecked: None,
    tmp_path: Path,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests have as many rows of logits as tokens were drafted, beside others that have more.

    With one method the rows are infinite, as of a last layer whose sums are too large.
    """
    if method == "ngram":
        monkeypatch.setattr(_llama(), "compute_logits", _infinite(_llama().compute_logits))
    drafting: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    drafting |= {"prompt_lookup_max": 2} if method == "ngram" else {"model": str(DEMO_MODEL_DIR)}
    loader = Loader(run, start_demo_engine(run, speculative_config=drafting))
    try:
        good = loader.load(make_adapter(tmp_path / "good", 3))
        bad = loader.load(make_adapter(tmp_path / "bad", 1, NOT_A_NUMBER))
        others = (None, good, None)
        expected = [loader.ask(one, DRAFTED) for one in others]
        assert all(expected)
        with pytest.raises(EngineFailureError, match="not finite"):
            loader.ask(bad, DRAFTED)
        for _ in range(2):
            found = run(_together(loader.engine, (bad, *others, bad)))
            assert [type(found[0]), type(found[-1])] == [EngineFailureError] * 2
            assert [one[-1].text for one in found[1:-1]] == expected
        assert loader.engine.not_finite == 0
    finally:
        run(loader.engine.close())


def _llama() -> Any:
    from vllm.model_executor.models.llama import (  # noqa: PLC0415 (imports vLLM)
        LlamaForCausalLM,
    )

    return LlamaForCausalLM


def _infinite(compute: Any) -> Any:
    def compute_logits(model: Any, *arguments: Any) -> Any:
        logits = compute(model, *arguments)
        bad = logits.isnan().any(dim=-1, keepdim=True)
        return logits.masked_fill(bad, float("-inf"))

    return compute_logits


async def _together(engine: Any, adapters: Iterable[Any]) -> list[Any]:
    jobs = [replace(job(ref), prompt=DRAFTED) for ref in adapters]
    return await asyncio.gather(*(collect(engine, one) for one in jobs), return_exceptions=True)


def test_blocks_of_a_not_finite_request_are_not_reused_by_prefix() -> None:
    """Before they are freed; the null block stays; requests of others are not touched."""
    from lmi_vllm.engine.vllm.workarounds.scheduler import (  # noqa: PLC0415 (imports vLLM)
        GuardedScheduler,
    )

    class Blocks:
        evicted: ClassVar[list[set[int]]] = []

        def get_block_ids(self, request: str) -> tuple[list[int], ...]:
            return {"bad": ([0, 4, 5], [7]), "good": ([1], [2])}[request]

        def evict_blocks(self, blocks: set[int]) -> None:
            self.evicted.append(blocks)

    scheduler: Any = GuardedScheduler.__new__(GuardedScheduler)
    scheduler.kv_cache_manager = Blocks()
    scheduler._forget_blocks(["bad"])
    assert Blocks.evicted == [{4, 5}, {7}]


def test_blocks_with_nan_leave_the_prefix_cache_before_reuse() -> None:
    """In the step itself: vLLM frees the blocks of a request that it ends there."""
    from lmi_vllm.engine.vllm.workarounds.scheduler import (  # noqa: PLC0415 (imports vLLM)
        EndsHarmfulRequests,
        GuardedScheduler,
    )

    steps: list[object] = []

    class Plain:
        def update_from_output(self, scheduled: object, computed: Any) -> dict[int, Any]:
            steps.append(("freed", computed.sampled_token_ids))
            return {}

        def finish_requests(self, names: Iterable[str], status: object) -> list[Any]:
            steps.append(("ended", list(names)))
            return []

    class Guarded(EndsHarmfulRequests, Plain):
        def _forget_blocks(self, corrupted: Iterable[str]) -> None:
            steps.append(("forgotten", list(corrupted)))

    assert GuardedScheduler.update_from_output is EndsHarmfulRequests.update_from_output
    scheduler: Any = Guarded.__new__(Guarded)
    scheduler._grammars = SimpleNamespace(slow=lambda _: {}, faulty=lambda _: {})
    scheduler.requests = dict.fromkeys(("bad", "good"))
    scheduler.vllm_config = SimpleNamespace(
        speculative_config=None,
        parallel_config=SimpleNamespace(worker_cls="auto"),
        use_v2_model_runner=False,
    )
    computed = SimpleNamespace(
        num_nans_in_logits={"bad": 3, "good": 0},
        req_id_to_index={"bad": 0, "good": 1},
        sampled_token_ids=[[5], [6]],
        pooler_output=None,
    )
    scheduler.update_from_output(None, computed)
    assert steps == [("forgotten", ["bad"]), ("freed", [[], [6]]), ("ended", ["bad"])]


def test_operators_scheduler_is_joined_with_ours(caplog: pytest.LogCaptureFixture) -> None:
    """In the name that vLLM looks up; what is no scheduler of vLLM's kind is named instead."""
    caplog.set_level(logging.WARNING)  # an import of vLLM's may raise the level of every handler
    from lmi_vllm.engine.vllm.workarounds.scheduler import (  # noqa: PLC0415 (imports vLLM)
        EndsHarmfulRequests,
    )

    def used_for(other: str) -> type:
        settings = SchedulerConfig.default_factory(scheduler_cls=other)
        end_not_finite(SimpleNamespace(scheduler_config=settings))
        return settings.get_scheduler_cls()

    from vllm.config import SchedulerConfig  # noqa: PLC0415

    joined = used_for("tests.support.operators_scheduler.OperatorsScheduler")
    assert joined.__mro__[1:3] == (EndsHarmfulRequests, joined.__bases__[1])
    assert joined.__bases__[1].__name__ == "OperatorsScheduler"
    assert "no subclass" not in caplog.text
    assert used_for(f"{__name__}.Loader") is Loader
    assert "Loader is no subclass of vLLM's Scheduler" in caplog.text


def test_new_blocks_are_cleared_in_every_layer_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VLLM's own way passes over layers with a window; other requests' blocks stay."""
    import torch  # noqa: PLC0415
    from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415 (imports vLLM)

    from lmi_vllm.engine.vllm.cpu.worker import GuardedCpuWorker  # noqa: PLC0415

    seen = []
    full, window = torch.full((4, 2), NOT_A_NUMBER), torch.full((4, 2), NOT_A_NUMBER)
    worker: Any = GuardedCpuWorker.__new__(GuardedCpuWorker)
    worker.model_runner = SimpleNamespace(kv_caches=[full, window, window, None])

    def execute_model(*_: object) -> None:
        seen.extend(cache.isnan().any(dim=-1).tolist() for cache in (full, window))

    monkeypatch.setattr(CPUWorker, "execute_model", execute_model)
    worker.execute_model(SimpleNamespace(new_block_ids_to_zero=None))
    assert seen == [[True] * 4] * 2
    worker.execute_model(SimpleNamespace(new_block_ids_to_zero=[1, 3]))
    assert seen[2:] == [[True, False, True, False]] * 2


def test_rows_of_no_use_are_counted_whatever_makes_them_so() -> None:
    """NaN, +Inf, or no token left; a token that the model rules out is none of these."""
    torch = pytest.importorskip("torch")
    from lmi_vllm.engine.vllm.workarounds.not_finite import requests_not_finite  # noqa: PLC0415

    inf = float("inf")
    rows = [[1.0, -inf], [NOT_A_NUMBER, 1.0], [inf, 1.0], [-inf, -inf], [0.0, 1e38]]
    assert requests_not_finite(list("abcde"), {}, torch.tensor(rows)) == list("bcd")
    drafts = {"a": [7, 7], "b": [7]}
    assert requests_not_finite(list("ab"), drafts, torch.tensor(rows)) == list("ab")
    assert requests_not_finite(list("ab"), {"b": [7, 7, 7]}, torch.tensor(rows)) == ["b"]
    assert requests_not_finite(list("ab"), {}, torch.tensor(rows)) == []
