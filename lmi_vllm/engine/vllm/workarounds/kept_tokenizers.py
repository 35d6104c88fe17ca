"""Tokenizers of an engine that has ended.

vLLM makes a class for each engine's tokenizer, whose functions hold copies of it, and remembers
which arguments its `apply_chat_template` takes. The functions are keys of that cache of 128. Here
it is emptied when an engine ends: the next one asks again, once for each argument.

Upstream: not reported that we know of. A bound method is no key of it any more, since it kept
    tensors.
Releases: 0.32.
Shows: each sleep of a model, and each restart of its engine, leaves five copies of its tokenizer.
    Of the embedded model they are 0.6 MB, with 1,280 tokens. That ends once 128 entries are full.
May go: when test_plain_vllm_keeps_tokenizers_that_no_engine_has fails.
"""

from lmi_vllm.engine.vllm.names import func_utils


def forget_tokenizers() -> None:
    """Let go of the tokenizers of engines that have ended."""
    func_utils._supports_kw.cache_clear()
