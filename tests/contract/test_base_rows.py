"""Rows of the base model beside adapters' rows on a CPU, by our worker or without it."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm.cpu.base_rows import skipping_base_rows
from lmi_vllm.engine.vllm.cpu.compilation import uncompiled
from lmi_vllm.engine.vllm.workarounds import is_affected, replace
from tests.contract.adapter_loader import Loader
from tests.contract.conftest import DEMO_ADAPTERS, LoopThread, start_demo_engine
from tests.support.adapter_files import make_head_adapter

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")
RANK, WIDTH = 2, 3


def wrapper(rows: list[int], change: Callable[[Any], Any]) -> Any:
    """Return vLLM's LoRA operations, changed, in a step with these adapter slots."""
    module = pytest.importorskip(
        "vllm.lora.punica_wrapper.punica_cpu", reason="needs vLLM: make setup installs it"
    )
    punica = change(module.PunicaWrapperCPU)(len(rows), len(rows), "cpu")
    for indices in (punica._token_lora_indices, punica._sampler_indices):
        indices[:] = torch.tensor(rows)
    punica.indices_len = [len(rows)] * 4
    return punica


@pytest.mark.parametrize("rows", [[0, -1, 1, -1], [-1, -1, -1, -1], [1, 0, 0, 1]])
@pytest.mark.parametrize("operation", ["linear", "logits", "embedding"])
def test_operations_pass_over_base_rows(rows: list[int], operation: str) -> None:
    """What has an adapter is changed by its own weights; what has none keeps its numbers."""
    punica = wrapper(rows, skipping_base_rows)
    down, up = torch.rand(2, RANK, WIDTH), torch.rand(2, WIDTH, RANK)
    inputs, output = torch.rand(len(rows), WIDTH), torch.ones(len(rows), WIDTH)
    if operation == "linear":
        punica.add_lora_linear(output, inputs, (down,), (up,), 1.0, (WIDTH,))
    elif operation == "logits":
        punica.add_lora_logits(output, inputs, down, up, 1.0)
    else:
        inputs, down = torch.rand(len(rows), RANK), torch.eye(RANK).repeat(2, 1, 1)
        punica.add_lora_embedding(output, inputs, up)
    for row, adapter in enumerate(rows):
        change = 0 if adapter < 0 else up[adapter] @ down[adapter] @ inputs[row]
        assert torch.allclose(output[row], torch.ones(WIDTH) + change)


def test_infinite_weights_stay_in_their_rows() -> None:
    """The adapter in the last slot may hold anything: zero times infinity is no number."""
    punica = wrapper([-1, 0], skipping_base_rows)
    up = torch.full((2, WIDTH, RANK), float("inf"))
    output = torch.ones(2, 2 * WIDTH)
    punica.add_expand(output, (torch.ones(2, RANK),), (up,), (WIDTH,), offset_start=WIDTH)
    assert output[0].tolist() == [1.0] * (2 * WIDTH)
    assert output[1, WIDTH:].isinf().all()


def test_plain_vllm_computes_base_rows_with_an_adapter() -> None:
    """Before 0.33; once no supported release does, only the cost of base steps keeps base_rows."""
    punica = wrapper([0, -1], lambda kind: kind)
    output = torch.ones(2, WIDTH)
    weights = torch.ones(2, RANK, WIDTH), torch.ones(2, WIDTH, RANK)
    punica.add_lora_logits(output, torch.ones(2, WIDTH), *weights, 1.0)
    is_wrong = output[1].tolist() != [1.0] * WIDTH
    assert is_wrong == is_affected("vllm", "0.33")


@pytest.fixture
def foreign(run: LoopThread) -> Iterator[Engine]:
    """An engine for one test, whose worker is vLLM's own.

    Of `workarounds` only one acts in it, which it has from this process: without that, log
    probabilities would need a C++ compiler.
    """
    with replace("vllm.v1.sample.sampler:batched_count_greater_than", uncompiled):
        engine = start_demo_engine(
            run, worker_cls="vllm.v1.worker.cpu_worker.CPUWorker", max_num_seqs=8
        )
    yield engine
    run(engine.close())


def test_base_rows_stay_base_with_a_foreign_worker(run: LoopThread, foreign: Engine) -> None:
    """Who brings a worker of their own gets the all-zero adapter for base rows instead."""
    adapters = Loader(run, foreign)
    base = adapters.ask()
    refs = [adapters.load(DEMO_ADAPTERS / name) for name in ("capitals", "json")]
    first, second = (adapters.ask(ref) for ref in refs)
    assert len({base, first, second}) == 3
    mixed = adapters.ask_together(None, refs[0], None, refs[1], None)
    assert mixed == [base, first, base, second, base]


def test_plain_vllm_mixes_prompt_logprobs_of_a_batch(
    run: LoopThread, foreign: Engine, tmp_path: Path
) -> None:
    """Beside another request they are of its adapter, or the engine ends."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

    from lmi_vllm.engine.vllm.names import to_lora_request  # noqa: PLC0415 (imports vLLM)

    adapters = Loader(run, foreign)
    head = adapters.load(make_head_adapter(tmp_path / "head", seed=77))

    llm, numbers = foreign._llm, itertools.count()  # type: ignore[attr-defined]
    known = llm.adapters.find(head.engine_id, head.name)

    async def one(*, with_head: bool) -> list[float]:
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=0)
        lora = to_lora_request(known) if with_head else None
        prompt = {"prompt_token_ids": [5, 6, 7, 8, 9, 10]}
        name = f"plain-{next(numbers)}"
        replies = AsyncLLM.generate(llm, prompt, sampling, name, lora_request=lora)
        (reply,) = [reply async for reply in replies if reply.finished]
        return [next(iter(token.values())).logprob for token in reply.prompt_logprobs[1:]]

    async def asked(*with_head: bool) -> list[list[float]]:
        return await asyncio.gather(*(one(with_head=each) for each in with_head))

    alone = [run(asked(each))[0] for each in (False, True)]
    try:
        mixed = run(asked(False, True, False, True))
    except EngineDeadError:
        return
    expected = [*alone, *alone]
    assert any(
        abs(one - other) > 0.01
        for found, wanted in zip(mixed, expected, strict=True)
        for one, other in zip(found, wanted, strict=True)
    )
