"""Base rows beside adapters' rows on a CPU (DECISIONS.md 9, 56).

Under LoRA, `PunicaWrapperCPU` computes rows of the base model that share a step with an adapter's
rows with the adapter in the last slot: their index is -1, and `weights[-1]` is the last. Here such
rows stay as they were, and a step without any adapter passes LoRA by.

Upstream: https://github.com/vllm-project/vllm/pull/48421 and 49656.
Releases: 0.31 and 0.32 are wrong; 0.33 masks the rows, and computes LoRA for every base step.
Shows: answers of the base model that change when an adapter is in use; since 0.33 half the tokens.
May go: when test_plain_vllm_computes_base_rows_with_an_adapter fails, and base steps cost no LoRA.
"""

from collections.abc import Callable
from typing import Any


def skipping_base_rows(wrapper: Any) -> Any:
    """Return a subclass of vLLM's `PunicaWrapperCPU` that leaves rows without an adapter alone."""

    class BaseRowSkippingWrapper(wrapper):  # type: ignore[misc,unused-ignore]
        """PunicaWrapperCPU over the rows that have an adapter."""

        def add_lora_linear(self, y: Any, *more: Any, **named: Any) -> None:
            """As PunicaWrapperCPU, in a step with an adapter: by `add_shrink` and `add_expand`."""
            if (self.token_lora_indices >= 0).any():
                super().add_lora_linear(y, *more, **named)

        def add_shrink(self, y: Any, *more: Any, **named: Any) -> None:
            """As PunicaWrapperCPU; its result for base rows is never used."""
            if (self.token_lora_indices >= 0).any():
                super().add_shrink(y, *more, **named)

        def add_expand(self, y: Any, *more: Any, **named: Any) -> None:
            """As PunicaWrapperCPU, for rows with an adapter."""
            _in_adapter_rows(self.token_lora_indices, super().add_expand, y, *more, **named)

        def add_lora_embedding(self, y: Any, *more: Any, **named: Any) -> None:
            """As PunicaWrapperCPU, for rows with an adapter."""
            _in_adapter_rows(self.token_lora_indices, super().add_lora_embedding, y, *more, **named)

        def add_lora_logits(self, y: Any, *more: Any, **named: Any) -> None:
            """As PunicaWrapperCPU, for rows with an adapter."""
            _in_adapter_rows(self.sampler_indices, super().add_lora_logits, y, *more, **named)

    return BaseRowSkippingWrapper


def _in_adapter_rows(
    slots: Any, compute: Callable[..., None], output: Any, *more: Any, **named: Any
) -> None:
    """Compute, then restore rows of slot -1; do nothing if there are no other rows.

    They are restored, not multiplied by zero: the last slot's weights may be infinite.
    """
    is_base = slots < 0
    if not is_base.any():
        compute(output, *more, **named)
        return
    if is_base.all():
        return
    rows = output.view(-1, output.shape[-1])
    is_base = is_base[: rows.shape[0]]
    kept = rows[is_base]
    compute(output, *more, **named)
    rows[is_base] = kept
