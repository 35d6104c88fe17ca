"""Prompts that begin with the text of the BOS token, before which the tokenizer puts another one.

Clients that write a chat template themselves send such a text as `prompt` or `inputs`. vLLM, LMI
and TGI then have two BOS, and some models answer worse (DECISIONS.md 142).
"""

import logging
from dataclasses import replace
from functools import cached_property
from typing import Any

logger = logging.getLogger(__name__)


class PromptStarts:
    """Says so once, or leaves one of the two."""

    def __init__(self, tokenizer: Any, *, leaves_one: bool) -> None:
        self._tokenizer = tokenizer
        self._leaves_one = leaves_one
        self._has_warned = False

    def read(self, prompt: Any, params: Any) -> tuple[Any, Any]:
        """Return a prompt and how to tokenize it: with one BOS, where that is wanted."""
        text = prompt.get("prompt")
        if not isinstance(text, str) or not self._bos or not text.startswith(self._bos):
            return prompt, params
        if not params.add_special_tokens:
            return prompt, params
        if self._leaves_one and params.truncate_prompt_tokens:  # the tokenizer's own is not cut
            return {**prompt, "prompt": text.removeprefix(self._bos)}, params
        if self._leaves_one:
            return prompt, replace(params, add_special_tokens=False)  # as chats are tokenized
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a prompt begins with %s, and the tokenizer puts another one before it: "
                "option.single_bos=true leaves one, and so do messages, or "
                '"add_special_tokens": false on /v1/completions',
                self._bos,
            )
        return prompt, params

    def adds_special(self, text: str) -> bool:
        """Whether the tokenizer's special tokens are wanted for a text that is only tokenized."""
        return not (self._leaves_one and self._bos and text.startswith(self._bos))

    @cached_property
    def _bos(self) -> str:
        """The text of a BOS that this tokenizer puts and reads; empty if it does not do both."""
        text, number = (
            getattr(self._tokenizer, name, None) for name in ("bos_token", "bos_token_id")
        )
        if not isinstance(text, str) or not text or number is None:
            return ""
        is_added = list(self._tokenizer.encode("")) == [number]
        is_read = list(self._tokenizer.encode(text)) == [number, number]
        return text if is_added and is_read else ""
