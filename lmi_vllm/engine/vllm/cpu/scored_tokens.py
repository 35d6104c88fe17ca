"""Log probabilities of named tokens, beside other requests with log probabilities.

`logprob_token_ids` of a request, and the labels of `/generative_scoring`, name tokens whose log
probabilities are wanted. Where one request of a step names some, vLLM gives every request of the
step these columns in place of its most probable tokens. Here each request gets its own.

With speculative decoding vLLM mixes up the two kinds of results, and the engine ends. Such requests
are refused (`fault_beside_drafts`), as vLLM itself refuses `logit_bias` there. Its second runner,
which GPUs have, does both.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: while a client calls `/generative_scoring`, answers to others have the token 0 with -9999 in
    place of their top log probabilities. With `speculative_config` the engine dies.
May go: when test_plain_vllm_gives_a_batch_the_columns_of_one_request fails, and drafts are scored.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

NOT_BESIDE_DRAFTS: Final = (
    "log probabilities of named tokens (logprob_token_ids, label_token_ids) are not available with "
    "speculative decoding (option.speculative_config)"
)


def fault_beside_drafts(params: Any, config: Any) -> str:
    """Return why the engine of this configuration would end at a request; "" if it would not."""
    is_named = getattr(params, "logprob_token_ids", None) is not None  # not of pooling
    has_drafts = config.speculative_config is not None and not config.use_v2_model_runner
    return NOT_BESIDE_DRAFTS if is_named and has_drafts else ""


def for_its_own_rows(forward: Any) -> Callable[..., Any]:
    """Return a `Sampler.forward` that gives each request the log probabilities that it wants."""

    @functools.wraps(forward)
    def sample(self: Any, logits: Any, sampling_metadata: Any, *more: Any, **named: Any) -> Any:
        wanted, most = sampling_metadata.logprob_token_ids, sampling_metadata.max_num_logprobs
        if not wanted or most is None or most < 0:
            return forward(self, logits, sampling_metadata, *more, **named)
        gather = self.gather_logprobs

        def gather_both(logprobs: Any, count: int, token_ids: Any) -> Any:
            scored = self.gather_specific_token_logprobs(logprobs, wanted, token_ids)
            return joined(gather(logprobs, count, token_ids), scored, wanted)

        self.gather_logprobs = gather_both  # until the method below has called it
        try:
            plain = replace(sampling_metadata, logprob_token_ids=None)
            return forward(self, logits, plain, *more, **named)
        finally:
            del self.gather_logprobs

    return sample


def joined(top: Any, scored: Any, rows: Collection[int]) -> Any:
    """Return vLLM's tensors of `top`, with those of `scored` in these rows."""
    width = max(top.logprobs.shape[1], scored.logprobs.shape[1])
    chosen = [*rows]
    ids, values = _padded(top, width)
    ids[chosen], values[chosen] = (each[chosen] for each in _padded(scored, width))
    return type(top)(ids, values, *top[2:])


def _padded(tensors: Any, width: int) -> tuple[Any, Any]:
    """Return token ids and log probabilities with so many columns: more are of no token."""
    shape, own = (len(tensors.logprobs), width), tensors.logprobs.shape[1]
    ids = tensors.logprob_token_ids.new_zeros(shape)
    values = tensors.logprobs.new_full(shape, float("-inf"))
    ids[:, :own], values[:, :own] = tensors.logprob_token_ids, tensors.logprobs
    return ids, values
