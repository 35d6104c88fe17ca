"""On a CPU, drafts of a sampled request are checked with numbers that were never written.

`expanded`: a request's temperature, top_k and top_p are repeated for each of its drafts. vLLM's CPU
kernel writes them into a copy of the result, which stays what the memory held before.

`top_k_of_any_number`: a step in which no request has a draft has no rows to apply `top_k` to. vLLM
asks for the largest one of none there, and the engine ends.

Upstream: vllm-project/vllm/issues/55005 (the first); the second is not reported that we know of.
Releases: 0.31 and later.
Shows: with speculative decoding, wrong text at any temperature but 0; with `top_k` the engine dies.
May go: when test_plain_vllm_does_not_expand_what_a_request_sets fails (the first), and when
    test_plain_vllm_has_no_top_k_of_no_rows fails (the second).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def expanded(_: object) -> "Callable[..., Tensor]":
    """Return what repeats a value of each request for every draft of it."""

    def expand(
        x: "Tensor",
        cu_num_tokens: "Tensor",
        num_tokens: int,
        replace_from: float = 0,
        replace_to: float = 0,
    ) -> "Tensor":
        """As vLLM's `expand_batch_to_tokens`: `cu_num_tokens` are the sums of drafts until each."""
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        values = x.masked_fill(x == replace_from, replace_to)
        return values.repeat_interleave(counts, output_size=num_tokens)

    return expand


def top_k_of_any_number(apply: Any) -> "Callable[..., Tensor]":
    """Return what keeps the `k` likeliest tokens of each row, also where there is no row."""

    def apply_top_k_only(logits: "Tensor", k: "Tensor") -> "Tensor":
        """As vLLM's: rows of `logits` by the vocabulary, and `k` for each row."""
        kept: Tensor = apply(logits, k) if len(logits) else logits
        return kept

    return apply_top_k_only
