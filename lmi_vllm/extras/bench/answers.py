"""An answer's bytes to the outcome of its request, whatever client carried them."""

import json
from dataclasses import dataclass, field

from lmi_vllm.extras.bench.dialects import AnswerPiece, RowReader, ServerDialect
from lmi_vllm.extras.bench.plan import RequestOutcome


@dataclass(slots=True)
class Answer:
    """Reads one answer of status 200."""

    dialect: ServerDialect
    outcome: RequestOutcome
    is_streaming: bool
    _rows: RowReader = field(default_factory=RowReader)
    _whole: list[bytes] = field(default_factory=list)
    _is_ended: bool = False
    _told: int | None = None

    def feed(self, piece: bytes, now: float) -> None:
        """Take bytes that came at `now`; tokens that come together count as one gap."""
        if not self.is_streaming:
            self._whole.append(piece)
            return
        found = [self.dialect.read_row(row) for row in self._rows.feed(piece)]
        self._take(found, now)

    def end(self, now: float) -> None:
        """All bytes have come; an answer without an end was cut."""
        if self.is_streaming:
            self._take([self.dialect.read_row(row) for row in self._rows.end()], now)
        else:
            self._take([self._read_whole()], now)
        if self._told is not None:
            self.outcome.output_tokens = self._told
        if not self._is_ended:
            self.outcome.fail("stream cut", "the answer ended without its last row")

    def _read_whole(self) -> AnswerPiece:
        raw = b"".join(self._whole)
        try:
            return self.dialect.read_whole(json.loads(raw))
        except ValueError:
            return AnswerPiece(error=f"no JSON: {raw[:100]!r}")

    def _take(self, found: list[AnswerPiece], now: float) -> None:
        tokens = sum(one.tokens for one in found)
        if tokens:
            self.outcome.add_tokens(tokens, now)
        for one in found:
            self._is_ended |= one.is_end
            if one.error is not None:
                self.outcome.fail("error in the answer", one.error)
            if one.output_tokens is not None:
                self._told = one.output_tokens
            if one.prompt_tokens is not None:
                self.outcome.prompt_tokens = one.prompt_tokens
