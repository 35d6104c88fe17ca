"""LoRA of a large step on a CPU, in parts of its tokens.

vLLM copies the adapter's weights for each token, and the copies again as float32: a prompt of 2,048
tokens with an adapter of rank 16 and layers of 8,192 needs 1.6 GB for a moment, for each layer. In
a small container the OOM killer ends the engine. In parts the copies take 24 MiB; each token's
numbers stay the same (`make bench ARGS=lora_step`: a third of the CPU time, too).

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: an engine that is killed for lack of memory at its first long prompts with an adapter.
May go: when test_plain_vllm_copies_an_adapter_for_each_token fails.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.engine.vllm.cpu.base_rows import skipping_base_rows

# That are copied at once, with 2 bytes and then with 4: more do not stay in the caches (measured).
_NUMBERS: Final = 4 << 20
# vLLM's method -> the one that takes a slot for each token.
_METHODS: Final = MappingProxyType(
    {
        f"_{operation}_{kind}": f"_{operation}_decode"
        for operation in ("shrink", "expand", "expand_slice")
        for kind in ("prefill", "decode")
    }
)


def guarded(wrapper: Any) -> Any:
    """Return a subclass of vLLM's `PunicaWrapperCPU` with this and with `base_rows`."""
    return skipping_base_rows(in_parts(wrapper))


def in_parts(wrapper: Any) -> Any:
    """Return a subclass of vLLM's `PunicaWrapperCPU` that copies weights for a part of a step."""

    class WrapperInParts(wrapper):  # type: ignore[misc,unused-ignore]
        """PunicaWrapperCPU, whose tokens each have the index of their adapter's slot."""

        part: slice | None = None  # of the tokens of a step, that is computed now

        @property
        def token_lora_indices(self) -> Any:
            """The slot of each token of the step, or of the part."""
            slots = super().token_lora_indices
            return slots if self.part is None else slots[self.part]

    methods = {
        name: _in_parts(getattr(wrapper, name), getattr(wrapper, by_token))
        for name, by_token in _METHODS.items()
    }
    return type("WrapperInParts", (WrapperInParts,), methods)


def _in_parts(whole: Callable[..., None], by_token: Callable[..., None]) -> Callable[..., None]:
    """Return a method that computes prompts as vLLM does answers: each token by its own slot."""

    def compute(self: Any, output: Any, inputs: Any, weights: Any, *more: Any) -> None:
        slots = self.token_lora_indices
        tokens = max(1, _NUMBERS // weights[0].numel())
        is_small = len(inputs) <= tokens or not len(inputs) == len(output) == len(slots)
        if is_small or (self.is_prefill and self.no_lora):
            whole(self, output, inputs, weights, *more)
            return
        try:
            for begin in range(0, len(inputs), tokens):
                self.part = slice(begin, begin + tokens)
                by_token(self, output[self.part], inputs[self.part], weights, *more)
        finally:  # the slots of a later step must not be those of this part
            self.part = None

    return compute
