"""LoRA of a large step on a CPU: the same numbers, without copies of the adapter for each token."""

from typing import Any

import pytest

from lmi_vllm.engine.vllm.cpu import lora_parts
from lmi_vllm.engine.vllm.cpu.lora_parts import in_parts

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")
TOKENS, RANK, WIDTH, SLOTS = 50, 4, 32, 3
LARGEST = RANK * WIDTH * 7  # seven tokens


def result(change: Any, operation: str, slots: Any, *, is_prefill: bool) -> tuple[Any, int]:
    """Return what vLLM's operations, changed, make of a step, and the most numbers of a tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415

    module = pytest.importorskip(
        "vllm.lora.punica_wrapper.punica_cpu", reason="needs vLLM: make setup installs it"
    )
    sizes: list[int] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = function(*args, **(kwargs or {}))
            sizes.append(made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    torch.manual_seed(7)
    punica = change(module.PunicaWrapperCPU)(TOKENS, TOKENS, "cpu")
    punica._token_lora_indices[:] = slots
    punica.indices_len = [TOKENS] * 4
    punica.is_prefill = is_prefill
    punica._update_prefill_metadata(slots)
    kind = torch.bfloat16
    down = torch.randn(SLOTS, 1, RANK, WIDTH, dtype=kind)
    up = torch.randn(SLOTS, 1, WIDTH, RANK, dtype=kind)
    inputs, output = torch.randn(TOKENS, WIDTH, dtype=kind), torch.zeros(TOKENS, WIDTH, dtype=kind)
    with Noting():
        if operation == "linear":
            punica.add_lora_linear(output, inputs, (down,), (up,), 0.5, (WIDTH,))
        else:
            punica.add_lora_embedding(output, inputs[:, :RANK].contiguous(), up)
    weights = max(down.numel(), up.numel())  # views of them are no copies
    return output, max(size for size in sizes if size != weights)


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("operation", ["linear", "embedding"])
def test_plain_vllm_copies_an_adapter_for_each_token(
    operation: str, monkeypatch: pytest.MonkeyPatch, *, is_prefill: bool
) -> None:
    """Ours copies it for a few; each number is the same, bit for bit."""
    monkeypatch.setattr(lora_parts, "_NUMBERS", LARGEST)
    slots = torch.randint(0, SLOTS, (TOKENS,)).sort().values
    plain, most = result(lambda kind: kind, operation, slots, is_prefill=is_prefill)
    assert most == TOKENS * RANK * WIDTH
    ours, most = result(in_parts, operation, slots, is_prefill=is_prefill)
    assert most <= max(LARGEST, TOKENS * WIDTH)
    assert torch.equal(plain, ours)
    assert plain.any()


def test_step_without_adapters_is_passed_over() -> None:
    """As in vLLM: nothing is copied for a prompt of the base model."""
    slots = torch.full((TOKENS,), -1)
    output, _ = result(in_parts, "linear", slots, is_prefill=True)
    assert not output.any()
