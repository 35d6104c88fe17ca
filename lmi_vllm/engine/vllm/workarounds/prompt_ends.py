"""Prompts that end with U+FFFD or inside a character: the answer's text begins after them.

vLLM gives the whole prompt to a `DecodeStream`, which takes it for what was said already. It does
not if the prompt's text ends with U+FFFD: the first text of the answer then has the prompt in it,
and a stop string is found there. For other tokenizers vLLM's own code loses the character that the
answer completes. Here the end of the prompt alone is the context, and text that was the prompt's is
taken away. A character that the prompt begins and the answer completes is the answer's.

Upstream: https://github.com/vllm-project/vllm/issues/48853
Releases: 0.31 and later.
Shows: the answer to a prompt that ends with U+FFFD begins with the prompt, the system message of
    a chat, too.
May go: when test_plain_vllm_repeats_a_prompt_that_ends_inside_a_character fails.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

import tokenizers.decoders

BROKEN: Final = "\ufffd"  # what a decoded text ends with where its last bytes are no character
# Tokens of the prompt's end that are decoded. Most prompts need only the first few: more are for
# long runs of tokens that are one byte each, or have no text.
SIZES: Final = (32, 512, 4096)
MOST_BROKEN: Final = 8  # tokens at the end that are part of a character, or U+FFFD
Decode = Callable[[Sequence[int]], str]


class PromptEnd(NamedTuple):
    """The last tokens of a prompt, and the text of them that is surely complete."""

    ids: list[int]
    complete: str
    is_complete: bool  # whether that is all their text


def prompt_end(ids: Sequence[int], decode: Decode) -> PromptEnd:
    """Return as much of a prompt's end as its text needs to be continued."""
    for size in SIZES:
        end = list(ids[-size:])
        for broken in range(min(MOST_BROKEN, len(end))):
            text = decode(end[: len(end) - broken])
            if not text:
                break  # tokens without a text: look further back
            if not text.endswith(BROKEN):
                return PromptEnd(end, text, broken == 0)
        if size >= len(ids):
            break
    end = list(ids[-SIZES[0] :])
    return PromptEnd(end, "", not decode(end))


class FirstText:
    """Decodes the answer's tokens until they have a text, without what is the prompt's."""

    __slots__ = ("_complete", "_decode", "_said", "ids")

    def __init__(self, end: PromptEnd, decode: Decode) -> None:
        self.ids = end.ids
        self._decode = decode
        self._complete = end.complete
        self._said = decode(end.ids)

    def add(self, token: int) -> str | None:
        """Return the first text that is complete; None before it."""
        text = self._decode([*self.ids, token])
        self.ids.append(token)
        if text.endswith(BROKEN):
            return None
        said, complete = self._said, self._complete
        if text.startswith(complete):  # a decoder may spoil complete characters beside broken ones
            text = text[len(complete) :]
            said = said[len(complete) :] if said.startswith(complete) else BROKEN * len(said)
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(said, text, strict=False))
        return text[sum(1 for _ in shared) :]


class FirstStream:
    """Stands for a `DecodeStream` until the first text, then puts one in its place."""

    __slots__ = ("_detokenizer", "_first")

    def __init__(self, detokenizer: Any, first: FirstText) -> None:
        self._detokenizer = detokenizer
        self._first = first

    def step(self, _: object, token: int) -> str | None:
        """Return the text that a token completes, as a `DecodeStream` does."""
        text = self._first.add(token)
        if text is not None:
            detokenizer = self._detokenizer
            detokenizer.stream = _stream(detokenizer, self._first.ids)
        return text


def begin_after(detokenizer: Any, prompt: Sequence[int] | None) -> None:
    """Let a detokenizer of vLLM's say nothing of the prompt, and no less than the answer."""
    if hasattr(detokenizer, "stream"):
        _continue_stream(detokenizer, prompt)
    elif hasattr(detokenizer, "read_offset"):
        _continue_offsets(detokenizer, prompt)


def _continue_stream(detokenizer: Any, prompt: Sequence[int] | None) -> None:
    """Begin a `DecodeStream` after the prompt, whatever its end is."""
    if not prompt:
        return
    skips = detokenizer.skip_special_tokens
    decode = partial(detokenizer.tokenizer.decode, skip_special_tokens=skips)
    end = prompt_end(prompt, decode)
    if end.is_complete:
        detokenizer.stream = _stream(detokenizer, end.ids)
    else:
        detokenizer.stream = FirstStream(detokenizer, FirstText(end, decode))


def _continue_offsets(detokenizer: Any, prompt: Sequence[int] | None) -> None:
    """Say the character that the answer completes, for tokenizers that no `DecodeStream` takes."""
    size, skips = len(detokenizer.tokenizer), detokenizer.skip_special_tokens

    def decode(ids: Sequence[int]) -> str:
        known = [token for token in ids if 0 <= token < size]
        return str(detokenizer.tokenizer.decode(known, skip_special_tokens=skips)) if known else ""

    end = prompt_end(prompt or (), decode)
    if end.is_complete:
        return
    first, read = FirstText(end, decode), detokenizer.decode_next
    start = detokenizer.read_offset

    def decode_next(token: int) -> str:
        read(token)  # it keeps what it needs of each token
        text = first.add(token)
        if text is None:
            return ""
        del detokenizer.decode_next
        detokenizer.prefix_offset = start
        detokenizer.read_offset = len(detokenizer.tokens)
        return text

    detokenizer.decode_next = decode_next


def _stream(detokenizer: Any, ids: list[int]) -> Any:
    skips = detokenizer.skip_special_tokens
    return tokenizers.decoders.DecodeStream(ids=ids, skip_special_tokens=skips)
