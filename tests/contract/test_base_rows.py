"""Rows of the base model beside adapters' rows on a CPU, by our worker or without it."""

import pytest

from tests.contract.adapter_loader import Loader
from tests.contract.conftest import DEMO_ADAPTERS, LoopThread, start_demo_engine

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")
RANK, WIDTH = 2, 3


def ours(name: str) -> object:
    """Return an operation as the worker's process has it."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from vllm.lora.ops.torch_ops import lora_ops  # noqa: PLC0415

    from lmi_vllm.engine.vllm.cpu_worker import _of_adapter_rows  # noqa: PLC0415

    return _of_adapter_rows(getattr(lora_ops, name))


@pytest.mark.parametrize("rows", [[0, -1, 1, -1], [-1, -1, -1, -1], [1, 0, 0, 1]])
def test_operations_pass_over_base_rows(rows: list[int]) -> None:
    """What has an adapter is changed by its own weights; what has none keeps its numbers."""
    expand, shrink = ours("bgmv_expand"), ours("bgmv_shrink")
    down = torch.rand(2, RANK, WIDTH)
    up = torch.rand(2, WIDTH, RANK)
    inputs, indices = torch.rand(4, WIDTH), torch.tensor(rows)
    small, output = torch.zeros(4, RANK), torch.ones(4, WIDTH)
    shrink(inputs, down, small, indices, 1.0)
    expand(small, up, output, indices, add_inputs=True)
    for row, adapter in enumerate(rows):
        change = 0 if adapter < 0 else up[adapter] @ down[adapter] @ inputs[row]
        assert torch.allclose(output[row], torch.ones(WIDTH) + change)


def test_infinite_weights_stay_in_their_rows() -> None:
    """The adapter in the last slot may hold anything: zero times infinity is no number."""
    expand = ours("bgmv_expand_slice")
    up = torch.full((2, WIDTH, RANK), float("inf"))
    output = torch.ones(2, 2 * WIDTH)
    expand(torch.ones(2, RANK), up, output, torch.tensor([-1, 0]), WIDTH, WIDTH, True)
    assert output[0].tolist() == [1.0] * (2 * WIDTH)
    assert output[1, WIDTH:].isinf().all()


def test_base_rows_stay_base_with_a_foreign_worker(run: LoopThread) -> None:
    """Who brings a worker of their own gets the all-zero adapter for base rows instead."""
    engine = start_demo_engine(
        run, worker_cls="vllm.v1.worker.cpu_worker.CPUWorker", max_num_seqs=8
    )
    adapters = Loader(run, engine)
    base = adapters.ask()
    refs = [adapters.load(DEMO_ADAPTERS / name) for name in ("capitals", "json")]
    first, second = (adapters.ask(ref) for ref in refs)
    assert len({base, first, second}) == 3
    mixed = adapters.ask_together(None, refs[0], None, refs[1], None)
    assert mixed == [base, first, base, second, base]
    run(engine.close())
