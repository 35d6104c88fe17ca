"""Bad words of several tokens, forbidden with a blank before them, too.

vLLM forbids a bad word as it is written, and with a blank before it only if both have as many
tokens and begin with different ones. Inside a text a word has the blank: "lies on" is three tokens
without it, and two with it. Such a word was never forbidden there. Transformers' documentation, and
our engine for T5, take both forms.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: with the embedded model `"bad_words": ["lies on"]` changes nothing in "The city lies on the
    river".
May go: when test_plain_vllm_leaves_out_bad_words_with_a_blank fails.
"""

from typing import Any

from lmi_vllm.engine.vllm.names import VLLMValidationError, vllm_settings


def forbid_with_a_blank(params: Any, tokenizer: Any) -> None:
    """Add the forms with a blank that vLLM left out of the sampling parameters of a request.

    Raises:
        VLLMValidationError: there are more forms than vLLM has room for.
    """
    forms: list[list[int]] = list(params.bad_words_token_ids or ())
    for word in params.bad_words:
        ids = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        if ids and ids not in forms:
            forms.append(ids)
    for name, unit, count in (
        ("VLLM_MAX_NUM_BAD_WORDS", "words", len(forms)),
        ("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "tokens", sum(map(len, forms))),
    ):
        if count > (most := int(getattr(vllm_settings, name, count))):
            raise VLLMValidationError(
                f"bad_words: at most {most} {unit} ({name}), with a blank before each word and "
                f"without; got {count}"
            )
    params._bad_words_token_ids = forms
