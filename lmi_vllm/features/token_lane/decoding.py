"""Texts of tokens by a table, for tokenizers whose tokens are bytes: Llama 3, Qwen, GPT-2, gpt-oss.

vLLM gives each token to a `DecodeStream` of the tokenizers library, which decodes the last few
tokens twice and compares; for the first it decodes the whole prompt. Where the decoder is the byte
level alone, a token's bytes never depend on its neighbours, so a table says them. What a
`DecodeStream` does with them stays: a text that ends in the middle of a character waits for the
next token, bytes that are no text become U+FFFD.

vLLM's own way remains for all other decoders, within a character that vLLM began, and for a token
whose text is another than its bytes say. This module imports no vLLM.
"""

from collections.abc import Mapping
from typing import Any, Final

import tokenizers.decoders
from tokenizers.decoders import ByteLevel

UNFINISHED: Final = "\ufffd"  # what a decoded text ends with where its last bytes are no character


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
    """The text or bytes that each token adds, filled on first use.

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


def tables_for(tokenizer: Any) -> Mapping[bool, Pieces] | None:
    """Return a table with and one without special tokens; None where a table would not do."""
    bare = getattr(tokenizer, "_tokenizer", None)
    if type(getattr(bare, "decoder", None)) is not ByteLevel:
        return None
    return {skips: Pieces(bare, skip_special_tokens=skips) for skips in (False, True)}


class TableText:
    """The text of one sequence by the table, in turns with vLLM's detokenizer of it.

    That one knows nothing of what is read here until it is written back.
    """

    __slots__ = (
        "_detokenizer", "_known", "_last", "_longest_stop", "_pending", "_stop", "_texts",
        "_unfinished", "ids", "is_plain", "pieces",
    )  # fmt: skip

    def __init__(self, detokenizer: Any, pieces: Pieces) -> None:
        self._detokenizer = detokenizer
        self.pieces = pieces
        self._stop: list[str] = detokenizer.stop
        self._longest_stop = max(map(len, self._stop), default=0)
        self.ids: list[int] = []  # that are not written back; their texts, but for the last pieces:
        self._texts: list[str] = []
        self._known = 0
        self._unfinished = b""  # a character's first bytes
        self._pending = 0  # tokens that these are from
        self._last = 1  # tokens that the newest text is from
        self.is_plain = not self._stop  # whether a token with a complete text is only one of `ids`

    def begin(self) -> bool:
        """Go on where vLLM is; False while it is, or may be, within a character."""
        ids = self._detokenizer.token_ids
        piece = self.pieces[ids[-1]] if ids else None
        self._last = 1
        self.is_plain = not self._stop
        return isinstance(piece, str) and piece != ""

    def read(self, ids: list[int]) -> str | None:
        """Return the text that may be said with these tokens, which are a step's.

        None is for vLLM to read: a stop string is in it, or a token that the table does not know.
        """
        before = self._unfinished, self._pending, self._last
        text = self._decode(ids)
        if text is None or (self._stop and self._has_stop(text)):
            self._unfinished, self._pending, self._last = before
            return None
        self._read_pieces()
        self.ids += ids
        self._texts.append(text)
        self._known = len(self.ids)
        if not self._stop:
            self.is_plain = self._last == 1 and not self._unfinished
            return text
        self._write()
        return str(self._detokenizer.get_next_output_text(False, True))

    def close(self) -> None:
        """Let every token come through `read` until the next `begin`."""
        self.is_plain = False

    def add(self, ids: list[int]) -> bool:
        """Write tokens whose text vLLM delivers later; False leaves them to vLLM."""
        text = self._decode(ids) if self.begin() else None
        if text is None:
            self._unfinished, self._pending = b"", 0
            return False
        self.ids, self._texts, self._known = ids, [text], len(ids)
        detokenizer = self._detokenizer
        delivered = detokenizer._last_output_text_offset
        self.write_back()
        detokenizer._last_output_text_offset = delivered
        return True

    def write_back(self) -> None:
        """Let vLLM's detokenizer go on from here."""
        detokenizer = self._detokenizer
        if self.ids:
            self._write()
            detokenizer._last_output_text_offset = len(detokenizer.output_text)
        tokens = detokenizer.token_ids
        pending = len(tokens) - self._pending
        # As the stream is after it has said a text: it keeps the tokens that the text is from.
        detokenizer.stream = tokenizers.decoders.DecodeStream(
            ids=tokens[pending - self._last : pending],
            skip_special_tokens=detokenizer.skip_special_tokens,
        )
        for token in tokens[pending:]:
            detokenizer.stream.step(detokenizer.tokenizer, token)
        self._unfinished, self._pending = b"", 0

    def _read_pieces(self) -> None:
        """Add the texts of the tokens that were only added to `ids`."""
        self._texts += map(self.pieces.__getitem__, self.ids[self._known :])  # type: ignore[arg-type]

    def _write(self) -> None:
        self._read_pieces()
        self._detokenizer.token_ids += self.ids
        self._detokenizer.output_text += "".join(self._texts)
        self.ids, self._texts, self._known = [], [], 0

    def _decode(self, ids: list[int]) -> str | None:
        found = ""
        for token in ids:
            piece = self.pieces[token]
            if piece is None:
                return None
            if isinstance(piece, str) and not self._unfinished:
                found += piece
                self._last = 1
                continue
            self._unfinished += piece.encode() if isinstance(piece, str) else piece
            self._pending += 1
            text = self._unfinished.decode(errors="replace")
            if not text.endswith(UNFINISHED):
                found += text
                self._last, self._unfinished, self._pending = self._pending, b"", 0
        return found

    def _has_stop(self, text: str) -> bool:
        """Whether a stop string ends in the new text; vLLM handles it."""
        held = self._detokenizer.output_text[-self._longest_stop :] + text
        return any(stop in held for stop in self._stop)
