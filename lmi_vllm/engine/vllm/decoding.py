"""Texts of tokens by a table, for tokenizers whose tokens are bytes: Llama 3, Qwen, GPT-2, gpt-oss.

vLLM gives each token to a `DecodeStream` of the tokenizers library, which decodes the last few
tokens twice and compares; for the first it decodes the whole prompt. Where the decoder is the byte
level alone, a token's bytes never depend on its neighbours, so a table says them. What a
`DecodeStream` does with them stays: a text that ends in the middle of a character waits for the
next token, bytes that are no text become U+FFFD.

vLLM's own way remains for all other decoders, for a prompt that ends in the middle of a character
and from a token on whose text is another than its bytes say. This module imports no vLLM.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from tokenizers.decoders import ByteLevel

UNFINISHED: Final = "\ufffd"  # what a decoded text ends with where its last bytes are no character
_LONGEST: Final = 4  # bytes of a character in UTF-8


def _bytes_of_characters() -> dict[str, int]:
    """Return which byte a character stands for: GPT-2's way to write bytes as text.

    Printable bytes of Latin-1 stand for themselves, the others for characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_BYTES: Final = _bytes_of_characters()


class Pieces(dict[int, str | bytes | None]):
    """What each token adds to a text, filled as tokens are met.

    Text where it is complete, bytes where they are no text without their neighbours, nothing where
    the tokenizer itself says something else.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._left_out = {
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special and skip_special_tokens
        }

    def __missing__(self, token: int) -> str | bytes | None:
        """Return and keep the piece of a token; a number that no tokenizer takes has none."""
        try:
            self[token] = self._piece(token)
        except (OverflowError, TypeError):
            self[token] = None
        return self[token]

    def _piece(self, token: int) -> str | bytes | None:
        raw = self._raw(self._tokenizer.id_to_token(token))
        text = raw.decode(errors="replace")
        if text != self._tokenizer.decode([token], skip_special_tokens=self._skips_special):
            return None
        is_complete = raw == text.encode() and not text.endswith(UNFINISHED)
        return text if is_complete else raw

    def _raw(self, token: str | None) -> bytes:
        """Return a token's bytes; a number without a token, and what is left out, has none."""
        if token is None or token in self._left_out:
            return b""
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return token.encode()  # an added token, written as it is

    def end_complete(self, tokens: Sequence[int]) -> bool:
        """Whether the text of these tokens ends with a character and not within one."""
        end = b""
        for token in reversed(tokens):
            piece = self[token]
            if piece is None:
                return False
            end = (piece.encode() if isinstance(piece, str) else piece) + end
            # What comes before cannot change whether the last character is complete.
            if len(end) >= 2 * _LONGEST:
                break
        return not end.decode(errors="replace").endswith(UNFINISHED)


class _NoPieces(dict[int, str | bytes | None]):
    """The table that knows no token: from then on the tokenizer itself is asked."""

    def __missing__(self, token: int) -> None:
        """Know nothing, and keep nothing."""


NO_PIECES: Final[Mapping[int, str | bytes | None]] = MappingProxyType(_NoPieces())


def tables_for(tokenizer: Any) -> Mapping[bool, Pieces] | None:
    """Return a table with and one without special tokens; None where a table would not do."""
    bare = getattr(tokenizer, "_tokenizer", None)
    if type(getattr(bare, "decoder", None)) is not ByteLevel:
        return None
    return {skips: Pieces(bare, skip_special_tokens=skips) for skips in (False, True)}
