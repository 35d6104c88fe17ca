"""Sequences of the token lane: their tokens here, and the update of vLLM's state of them."""

from collections.abc import Callable
from typing import Any

from lmi_vllm.engine.vllm.chunks import finite
from lmi_vllm.features.token_lane.decoding import Pieces, TableText
from lmi_vllm.features.token_lane.logprobs import sampled_logprobs
from lmi_vllm.features.token_lane.readers import SampledLogprob, TokenReader


class LaneSequence:
    """One sequence, of which the lane has the middle; `_in_lane` between hand-overs."""

    __slots__ = ("_count", "_cumulative", "_has_logprobs", "_in_lane", "_state", "time")

    def __init__(self, state: Any) -> None:
        self._state = state
        self._has_logprobs = state.logprobs_processor.logprobs is not None
        self._in_lane = False
        self._count = 0  # tokens that vLLM has not counted
        self._cumulative = 0.0  # log probability that vLLM has not added
        self.time = 0.0  # of the newest output, by the engine's clock

    def take(self, output: Any) -> bool:
        """Read an output; False leaves it to vLLM, which knows all that came before."""
        ids = output.new_token_ids
        if (
            not ids
            or output.finish_reason is not None
            or output.events is not None
            or output.num_nans_in_logits
            or (output.new_logprobs is None) is self._has_logprobs
            or not (self._in_lane or self._begin())
            or not self._read(ids, output.new_logprobs)
        ):
            self.hand_over()
            return False
        self._count += len(ids)
        return True

    def hand_over(self) -> None:
        """Update vLLM's state with all that the lane has taken."""
        if not self._in_lane:
            return
        self._in_lane = False
        self._write_back()
        state = self._state
        if self._has_logprobs:
            state.logprobs_processor.cumulative_logprob += self._cumulative
            self._cumulative = 0.0
        if state.stats is not None and self._count:
            state.stats.num_generation_tokens += self._count
            state.stats.last_token_ts = self.time
        self._count = 0

    def after_vllm(self, time: float) -> None:
        """Note that vLLM has just read an output of this sequence."""
        self.time = time

    def _begin(self) -> bool:
        """Start from vLLM's state, where that is possible."""
        self._in_lane = not self._state.is_prefilling and self._may_begin()
        return self._in_lane

    def _may_begin(self) -> bool:
        return True

    def _read(self, ids: list[int], logprobs: Any) -> bool:
        raise NotImplementedError

    def _write_back(self) -> None:
        pass

    def _values(self, logprobs: Any) -> list[float] | None:
        """Return the log probabilities of the sampled tokens, which the sampler puts first."""
        if logprobs is None:
            return None
        values = sampled_logprobs(logprobs)
        self._cumulative += sum(values)
        return values


class WholeSequence(LaneSequence):
    """A sequence that is wanted whole: its tokens are kept, and decoded together."""

    __slots__ = ("_ids", "_logprobs", "_pieces")

    def __init__(self, state: Any, pieces: Pieces | None) -> None:
        super().__init__(state)
        self._pieces = pieces
        self._ids: list[int] = []
        self._logprobs: list[dict[int, SampledLogprob]] = []

    def _read(self, ids: list[int], logprobs: Any) -> bool:
        self._ids += ids
        if logprobs is not None:
            for tokens, values, rank in zip(*tuple(logprobs)[:3], strict=False):
                value = values.item(0)
                self._cumulative += value
                self._logprobs.append({tokens.item(0): SampledLogprob(value, int(rank))})
        return True

    def _write_back(self) -> None:
        ids, self._ids = self._ids, []
        state, detokenizer = self._state, self._state.detokenizer
        if self._pieces is None or not TableText(detokenizer, self._pieces).add(ids):
            detokenizer.update(ids, False)
        if self._logprobs:
            state.logprobs_processor.logprobs += self._logprobs
            self._logprobs = []


class SparseSequence(WholeSequence):
    """A stream that vLLM delivers every few tokens (`stream_interval`): the lane has those between.

    As of a whole answer, only tokens are kept: nothing is decoded before a delivery.
    """

    __slots__ = ()

    def _read(self, ids: list[int], logprobs: Any) -> bool:
        state = self._state
        count = state.detokenizer.num_output_tokens() + len(self._ids) + len(ids)
        is_due = count - state.sent_tokens_offset >= state.stream_interval
        return not is_due and super()._read(ids, logprobs)


class StreamedSequence(LaneSequence):
    """A sequence with a reader, decoded by vLLM's own detokenizer."""

    __slots__ = ("_gate", "_queue", "_reader")

    def __init__(self, state: Any, reader: TokenReader) -> None:
        super().__init__(state)
        self._queue = state.queue
        self._reader = reader
        self._gate = reader.gate

    @property
    def _may_read(self) -> bool:
        """Whether the reader may have tokens now: what waits in vLLM's queue comes first."""
        return self._queue.output is None and self._reader.is_ready and self._gate.is_open

    def _read(self, ids: list[int], logprobs: Any) -> bool:
        text = self._text(ids) if self._may_read else None
        if text is None:
            return False
        self._hand_on(self._reader.read, ids, text, self._values(logprobs))
        return True

    def _hand_on(self, read: Callable[..., None], *tokens: object) -> None:
        try:
            read(*tokens)
        except Exception as error:  # noqa: BLE001 (ends this request; the output loop goes on)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._queue.put(error)

    def _text(self, ids: list[int]) -> str | None:
        """Return the text that these tokens let out; None leaves them to vLLM."""
        detokenizer = self._state.detokenizer
        detokenizer.update(ids, False)
        return str(detokenizer.get_next_output_text(False, True))

    def after_vllm(self, time: float) -> None:
        """Let a reader that counts by vLLM's outputs see those that it had itself."""
        self.time = time
        complete = getattr(self._reader, "complete", None)
        if complete is not None:
            complete(self._queue.output)


class TableSequence(StreamedSequence):
    """A sequence with a reader, decoded by the table."""

    __slots__ = ("_pieces", "_special", "_table")

    def __init__(self, state: Any, reader: TokenReader, table: TableText) -> None:
        super().__init__(state, reader)
        self._table = table
        self._pieces = table.pieces
        self._special = reader.special_ids

    def take(self, output: Any) -> bool:
        """As that of the base, which the usual case goes around: one token with its whole text."""
        ids, logprobs = output.new_token_ids, output.new_logprobs
        if (
            self._in_lane
            and self._table.is_plain
            and len(ids) == 1
            and output.finish_reason is None
            and output.events is None
            and not output.num_nans_in_logits
            and (logprobs is None) is not self._has_logprobs
            and type(text := self._pieces[token := ids[0]]) is str
            and token not in self._special
            and self._reader.is_ready
            and self._gate.is_open
        ):
            self._table.ids.append(token)
            self._count += 1
            try:
                value = None if logprobs is None else self._value(logprobs)
                self._reader.read_token(token, text, value)
            except Exception as error:  # noqa: BLE001 (ends this request; the output loop goes on)
                self._fail(error)
            return True
        return super().take(output)

    def _read(self, ids: list[int], logprobs: Any) -> bool:
        texts = self._plain_texts(ids) if self._may_read else None
        if texts is None:
            return super()._read(ids, logprobs)
        self._table.ids.extend(ids)
        self._hand_on(self._reader.read_tokens, ids, texts, self._values(logprobs))
        return True

    def _plain_texts(self, ids: list[int]) -> list[str] | None:
        """Return each token's text; None if one is special, or has no text of its own."""
        if not self._table.is_plain or not self._special.isdisjoint(ids):
            return None
        texts = [text for token in ids if isinstance(text := self._pieces[token], str)]
        return texts if len(texts) == len(ids) else None

    def _fail(self, error: Exception) -> None:
        self._table.close()  # what is in the queue comes first
        super()._fail(error)

    def _value(self, logprobs: Any) -> float:
        (value,) = sampled_logprobs(logprobs)
        self._cumulative += value
        return finite(value)

    def _may_begin(self) -> bool:
        return self._table.begin()

    def _text(self, ids: list[int]) -> str | None:
        return self._table.read(ids)

    def _write_back(self) -> None:
        self._table.write_back()


class IntervalSequence(TableSequence):
    """A sequence whose reader gets the tokens of several steps together (`stream_interval`)."""

    __slots__ = ("_interval", "_kept", "_kept_values")
    take = LaneSequence.take  # no token is handed on alone

    def __init__(self, state: Any, reader: TokenReader, table: TableText) -> None:
        super().__init__(state, reader, table)
        self._interval: int = state.stream_interval
        self._kept: list[int] = []
        self._kept_values: list[float] = []

    def _may_begin(self) -> bool:
        state = self._state
        has_sent_all = state.sent_tokens_offset == state.detokenizer.num_output_tokens()
        return has_sent_all and super()._may_begin()

    def _read(self, ids: list[int], logprobs: Any) -> bool:
        if len(self._kept) + len(ids) < self._interval:
            self._kept += ids
            self._kept_values += super()._values(logprobs) or ()
            return True
        if not super()._read([*self._kept, *ids], logprobs):
            return False
        self._kept = []
        return True

    def _values(self, logprobs: Any) -> list[float] | None:
        """Return those of all tokens that are handed on."""
        values = super()._values(logprobs)
        if values is not None:
            values = self._kept_values + values
            self._kept_values = []
        return values

    def _write_back(self) -> None:
        """Let vLLM go on with what was handed on as sent, and with the kept tokens as not sent."""
        super()._write_back()
        state, kept = self._state, self._kept
        state.sent_tokens_offset = state.detokenizer.num_output_tokens()
        if not kept:
            return
        state.detokenizer.update(kept, False)
        if self._has_logprobs:
            entries = map(SampledLogprob, self._kept_values)
            made = [{token: entry} for token, entry in zip(kept, entries, strict=True)]
            state.logprobs_processor.logprobs += made
        self._kept, self._kept_values = [], []
