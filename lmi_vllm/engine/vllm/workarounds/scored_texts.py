"""Pairs of texts that a cross-encoder reads together, as they are tokenized.

vLLM's handler of scores has no bound for them. The tokenizers library makes an object of each pair
of parts that it cuts off: of two texts with 2000 tokens, of which five are kept, four million. Here
each text is cut first, so that the kept tokens are the same.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: 20 KB that are to be ranked, with `truncate_prompt_tokens` 5, take 14 s and 8 GB.
May go: when test_plain_vllm_makes_every_pair_of_parts_that_it_cuts_off fails.
"""

from functools import partial
from typing import Any

from lmi_vllm.engine.text_bounds import LEAST_CHARACTERS, SPARE_TOKENS, kept_text
from lmi_vllm.engine.vllm.workarounds.text_lengths import characters


def bound_scored_texts(state: Any) -> None:
    """Make vLLM's handler of scores cut the texts of a pair before it tokenizes them."""
    scores: Any = getattr(getattr(state, "serving_scores", None), "io_processor", None)
    if not hasattr(scores, "get_score_prompt"):
        return
    plain = scores.get_score_prompt

    def get_score_prompt(data_1: Any, data_2: Any, encode_kwargs: Any, **more: Any) -> Any:
        cut = partial(_cut, scores, encode_kwargs.get("truncation") and encode_kwargs["max_length"])
        data_1 = cut(data_1, more.get("max_tokens_per_query", 0))
        data_2 = cut(data_2, more.get("max_tokens_per_doc", 0))
        return plain(data_1=data_1, data_2=data_2, encode_kwargs=encode_kwargs, **more)

    scores.get_score_prompt = get_score_prompt


def _cut(scores: Any, both: int | None, data: Any, alone: int) -> Any:
    """Return a text, or parts, of a pair: so much of it that its kept tokens are the same.

    `both` texts have so many tokens together, or one has so many `alone`, from its beginning.
    """
    tokenizer, tokens = scores.tokenizer, alone or both
    longest = tokenizer.max_chars_per_token
    if not tokens or not isinstance(data, str):
        most = max(scores.model_config.max_model_len * longest, LEAST_CHARACTERS)
        if (length := characters(data)) > most:
            raise ValueError(f"a text to score: at most {most} characters (got {length})")
        return data
    side = "right" if alone else tokenizer.truncation_side
    data = kept_text(data, tokens, longest, side)
    spare = tokens + SPARE_TOKENS
    if not tokenizer.is_fast or len(data) <= max(2 * spare, 8 * tokens):
        return data  # the pairs of what is cut off are few
    offsets = tokenizer(data, add_special_tokens=False, return_offsets_mapping=True)
    offsets = offsets["offset_mapping"]
    if len(offsets) <= spare:
        return data
    return data[offsets[-spare][0] :] if side == "left" else data[: offsets[spare - 1][1]]
