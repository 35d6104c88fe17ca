"""What sampling knows of a request's drafts on a CPU, and steps in which no request has one."""

import importlib
from typing import Any

import pytest

from lmi_vllm.engine.vllm.cpu.drafted_sampling import expanded, top_k_of_any_number

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")
UNWRITTEN = -7
DRAFTS = [2, 0, 3]  # of three requests


@pytest.fixture
def sampler() -> Any:
    """Return vLLM's module, with its kernels for a CPU."""
    reason = "needs vLLM: make setup installs it"
    return pytest.importorskip("vllm.v1.sample.rejection_sampler", reason=reason)


def sums(drafts: list[int]) -> Any:
    """Return how many drafts there are until the end of each request."""
    return torch.tensor(drafts).cumsum(0).to(torch.int32)


def test_plain_vllm_does_not_expand_what_a_request_sets() -> None:
    """`drafted_sampling.expanded`: what the result's memory held before is what it holds."""
    kernels = pytest.importorskip("vllm.utils.cpu_triton_utils")
    importlib.import_module("vllm.platforms").current_platform.import_kernels()
    for values in (torch.tensor([0.5, 0.7, 0.9]), torch.tensor([5, 6, 7], dtype=torch.int32)):
        found = values.new_full((sum(DRAFTS),), UNWRITTEN)
        kernels._expand_kernel_impl(found, values, sums(DRAFTS), 0, 0)
        assert found.tolist() == [UNWRITTEN] * sum(DRAFTS)


@pytest.mark.parametrize(
    "values",
    [[0.5, 0.7, 0.9], torch.tensor([50, 60, 70], dtype=torch.int32), torch.tensor([50, 60, 70])],
)
def test_each_draft_has_what_its_request_sets(sampler: Any, values: Any) -> None:
    """Fractions too; a request without drafts has no row."""
    given = torch.as_tensor(values)
    found = expanded(sampler.expand_batch_to_tokens)(given, sums(DRAFTS), sum(DRAFTS))
    first, _, last = given.tolist()
    assert found.dtype == given.dtype
    assert found.tolist() == [first, first, last, last, last]


def test_a_greedy_request_divides_by_one(sampler: Any) -> None:
    """Its temperature is 0, and one of a request beside it is not."""
    expand = expanded(sampler.expand_batch_to_tokens)
    given = torch.tensor([0.0, 0.5])
    assert expand(given, sums([2, 1]), 3, replace_from=0, replace_to=1).tolist() == [1, 1, 0.5]
    assert given.tolist() == [0, 0.5], "the batch keeps its own"
    assert expand(given, sums([0, 0]), 0).tolist() == []


def test_plain_vllm_has_no_top_k_of_no_rows() -> None:
    """`drafted_sampling.top_k_of_any_number`: the engine ends at such a step."""
    plain = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_only
    nothing = torch.empty(0, 4), torch.empty(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"max\(\)"):
        plain(*nothing)
    ours = top_k_of_any_number(plain)
    assert ours(*nothing).shape == (0, 4)
    kept = ours(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor([2], dtype=torch.int32))
    assert kept.tolist() == [[-float("inf"), 3, 2, -float("inf")]]
