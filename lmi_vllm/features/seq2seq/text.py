"""Incremental detokenization with stop strings, as vLLM's detokenizer does it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one sequence.

    Characters that may turn out to begin a stop string are held back until that is decided.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        skips_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._stream = DecodeStream(skip_special_tokens=skips_special)
        self._stop = stop
        self._includes_stop = includes_stop
        self._held = 0 if includes_stop else max((len(one) - 1 for one in stop), default=0)
        self._text = ""
        self._shown = 0

    def add(self, token: int, *, looks_for_stop: bool = True) -> str | None:
        """Take a token; returns the stop string that its text completed, and cuts the text."""
        new = self._step(token) or ""
        self._text += new
        if not new or not looks_for_stop:
            return None
        return self._cut(len(self._text) - len(new))

    def take(self, *, is_last: bool) -> str:
        """Return the new text that no stop string can cut any more; all of it with `is_last`."""
        end = len(self._text) if is_last else max(self._shown, len(self._text) - self._held)
        piece = self._text[self._shown : end]
        self._shown = end
        return piece

    def _step(self, token: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token)
        except Exception as error:
            # The token changes the text before it: go on from this token, as vLLM does. The library
            # raises a plain Exception for it.
            if not str(error).startswith("Invalid prefix"):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skips_special)
            return self._stream.step(self._tokenizer, token)

    def _cut(self, old: int) -> str | None:
        """Cut at the stop string that ends first after `old` characters, and return it."""
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := self._text.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if not matches:
            return None
        end, start, stop = min(matches, key=lambda one: one[0])
        self._text = self._text[: end if self._includes_stop else start]
        return stop


class TokenTexts:
    """The text of a single token as it appears within a text.

    Tokenizers that encode a space as part of a word (SentencePiece) drop it at the beginning of a
    text, so each token is decoded after another one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        (self._before, *_) = tokenizer.encode("a", add_special_tokens=False) or [0]
        self._prefix = len(self._decoded([self._before]))
        self.text = lru_cache(maxsize=1 << 16)(self._text)

    def _text(self, token: int) -> str:
        return self._decoded([self._before, token])[self._prefix :]

    def _decoded(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
