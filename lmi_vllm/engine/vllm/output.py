"""vLLM's output processor, extended in one place: `DirectOutputProcessor.add_request`.

For each token vLLM makes a `RequestOutput`, puts it into a queue and wakes the task that waits
there, which hands it up through a generator for each layer. A reader that wants nothing but the
next token is called instead, from the output loop itself. Everything else goes vLLM's way: the
first and the last output, errors, aborts, and whatever comes while the reader is busy or its client
reads slowly (vLLM joins what waits). Stop strings, counters and metrics come before, for both ways.

The log probability of the sampled token alone is converted without decoding the token once more
(DECISIONS.md 48). Texts of byte-level tokens come from a table (`decoding`). What vLLM counts for a
sequence goes to the record of its request.

All of it are subclasses: what vLLM has made hands its state over to one of ours, which is called.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from vllm.logprobs import Logprob
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.engine.vllm.chunks import ChunkMaker, SequenceWork, count_not_finite, finite
from lmi_vllm.engine.vllm.decoding import NO_PIECES, UNFINISHED, Pieces, tables_for
from lmi_vllm.engine.vllm.events import TextEvents
from lmi_vllm.messages import GenerationChunk
from lmi_vllm.telemetry.records import current_record

Ours = TypeVar("Ours")


@dataclass(frozen=True, slots=True)
class DirectRequest:
    """How the next sequence that is added in this context is treated."""

    chunks: ChunkMaker | None = None
    direct: DirectChunks | None = None
    has_sampled_logprobs_only: bool = False
    events: TextEvents | None = None


_CURRENT: Final[ContextVar[DirectRequest | None]] = ContextVar("lmi_vllm_direct", default=None)


class ReadDirectly:
    """Let the sequences that are added by the body, in this context, be read directly."""

    __slots__ = ("_request", "_token")

    def __init__(self, request: DirectRequest | None) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self._request)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


def _with_state_of(made: object, kind: type[Ours]) -> Ours:
    """Return an object of our subclass that goes on with the state of one that vLLM has made."""
    ours = kind.__new__(kind)
    ours.__dict__ = vars(made)
    return ours


class DirectOutputProcessor(OutputProcessor):  # type: ignore[misc,unused-ignore]
    """vLLM's output processor, whose sequences may be read directly, and which counts its steps."""

    steps: int  # of the engine, as far as their outputs have arrived
    not_finite: int  # requests without an adapter whose logits were not
    report: Callable[[str], None] | None  # is called with the id of each request before the engine
    _tables: Mapping[bool, Pieces] | None

    @classmethod
    def of(cls, made: OutputProcessor) -> Self:
        """Return ours in place of one that has no request yet."""
        ours = _with_state_of(made, cls)
        ours.steps, ours.not_finite, ours.report = 0, 0, None
        ours._tables = tables_for(made.tokenizer)
        return ours

    def add_request(
        self,
        request: Any,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        """Add a sequence; called in the context of its request, by every handler of vLLM's."""
        number = request.request_id
        is_known = number in self.request_states
        super().add_request(request, prompt, parent_req, request_index, queue)
        if not is_known:
            state = self._shortened(self.request_states[number], _CURRENT.get())
            self.request_states[number] = state
            record = current_record()
            if record is not None:  # the sequences of one prompt (`n`) share it
                record.work.append(SequenceWork(state, has_prompt=request_index == 0))
        if self.report is not None:
            self.report(number)

    def process_outputs(self, engine_core_outputs: list[Any], *more: Any, **named: Any) -> Any:
        """As vLLM's; counts the requests that ended because their logits were not finite."""
        for output in engine_core_outputs:
            if output.num_nans_in_logits and (state := self.request_states.get(output.request_id)):
                self.not_finite += count_not_finite(state.lora_name)
        return super().process_outputs(engine_core_outputs, *more, **named)

    def update_scheduler_stats(self, scheduler_stats: Any) -> None:
        """As vLLM's, called for each message of the engine: counts steps without tokens, too."""
        self.steps += 1
        super().update_scheduler_stats(scheduler_stats)

    def _shortened(self, state: Any, request: DirectRequest | None) -> Any:
        """Return the state of a new sequence with the shortest way that gives the same."""
        if self._tables is not None:
            state.detokenizer = with_table(
                state.detokenizer, state.prompt_token_ids or (), self._tables
            )
        if request is None:
            return state
        logprobs = state.logprobs_processor
        if request.has_sampled_logprobs_only and type(logprobs) is LogprobsProcessor:
            state.logprobs_processor = _with_state_of(logprobs, SampledLogprobs)
        # A step that is held back (`stream_interval`) or shared (`n`) stays vLLM's business.
        if state.parent_req is not None or state.stream_interval != 1:
            return state
        if request.direct is not None and request.chunks is not None:
            return _ChunkState.of(state, request.direct, request.chunks)
        if request.events is not None:
            return _TextState.of(state, request.events)
        return state


class SampledLogprobs(LogprobsProcessor):  # type: ignore[misc,unused-ignore]
    """vLLM's log probabilities of a sequence, of the sampled tokens alone and without texts."""

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        """Add the new tokens; the sampler puts the sampled one first."""
        for tokens, values, rank in zip(*logprobs_lists[:3], strict=False):
            value = values.item(0)
            self.cumulative_logprob += value
            self.logprobs.append({tokens.item(0): Logprob(value, rank, None)})


class TableDetokenizer(FastIncrementalDetokenizer):  # type: ignore[misc,unused-ignore]
    """vLLM's detokenizer of a sequence, with a table in place of its `DecodeStream`.

    Stop strings and the cutting of texts are vLLM's. `stream` waits where the prompt ended.
    """

    pieces: Mapping[int, str | bytes | None]
    unfinished: bytes

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """See vLLM's; the common case, one token and nothing to look for, goes straight through."""
        if self.stop or stop_terminated or len(new_token_ids) != 1:
            found: str | None = super().update(new_token_ids, stop_terminated)
            return found
        token = new_token_ids[0]
        self.token_ids.append(token)
        piece = self.pieces[token]
        if isinstance(piece, str) and not self.unfinished:  # as decode_next, without the call
            self.output_text += piece
        else:
            self.output_text += self.decode_next(token)
        return None

    def decode_next(self, next_token_id: int) -> str:
        """Return the text that is complete with this token."""
        piece = self.pieces[next_token_id]
        if isinstance(piece, str) and not self.unfinished:
            return piece
        if piece is None:
            return self._decode_vllms_way(next_token_id)
        self.unfinished += piece.encode() if isinstance(piece, str) else piece
        text = self.unfinished.decode(errors="replace")
        if text.endswith(UNFINISHED):
            return ""
        self.unfinished = b""
        return text

    def _decode_vllms_way(self, token: int) -> str:
        """Let vLLM decode from here on; return the text of the newest token."""
        if self.pieces is NO_PIECES:
            return str(super().decode_next(token))
        self.pieces = NO_PIECES
        text = ""
        for known in self.token_ids:
            text = super().decode_next(known)
        return text


def with_table(
    detokenizer: Any, prompt: Sequence[int], tables: Mapping[bool, Pieces]
) -> FastIncrementalDetokenizer:
    """Return a detokenizer with a table, or vLLM's own where the table would say something else."""
    if (
        type(detokenizer) is not FastIncrementalDetokenizer
        or not detokenizer.spaces_between_special_tokens
    ):
        return detokenizer
    pieces = tables[detokenizer.skip_special_tokens]
    if not pieces.end_complete(prompt):
        return detokenizer
    ours = _with_state_of(detokenizer, TableDetokenizer)
    ours.pieces, ours.unfinished = pieces, b""
    return ours


class _DirectState(RequestState):  # type: ignore[misc,unused-ignore]
    """The state of a sequence, whose outputs are read as they are made where that is possible."""

    reader: Any  # DirectChunks or TextEvents

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        """Return vLLM's output, or nothing where it has been read already."""
        if (
            finish_reason is not None
            or not new_token_ids
            or self.queue.output is not None  # what waits there comes first
            or not self.reader.is_open
        ):
            output = super().make_request_output(
                new_token_ids, pooling_output, finish_reason, *more, **named
            )
            return self._completed(output)
        try:
            self._read(new_token_ids, self.detokenizer.get_next_output_text(False, True))
        except Exception as error:  # noqa: BLE001 (ends this request; vLLM's loop goes on)
            self.queue.put(error)
        return None

    def _read(self, ids: list[int], text: str) -> None:
        raise NotImplementedError

    def _completed(self, output: Any) -> Any:
        return output


class _ChunkState(_DirectState):
    """Hands tokens on as chunks of ours."""

    chunks: ChunkMaker
    has_more: bool
    special: frozenset[int]

    @classmethod
    def of(cls, made: RequestState, reader: DirectChunks, chunks: ChunkMaker) -> Self:
        ours = _with_state_of(made, cls)
        ours.reader, ours.chunks = reader, chunks
        ours.has_more, ours.special = chunks.count != 0, chunks.special_ids
        return ours

    def _read(self, ids: list[int], text: str) -> None:
        found = self.logprobs_processor.logprobs
        if len(ids) == 1 and not self.has_more and (token := ids[0]) not in self.special:
            logprob = None if found is None else finite(found[-1][token].logprob)
            self.reader.read_token(token, text, logprob)
            return
        logprobs = None if found is None else found[-len(ids) :]
        tokens = self.chunks.tokens(ids, text, logprobs)
        self.reader.read_chunk(GenerationChunk(0, tokens, text))


class _TextState(_DirectState):
    """Hands texts on as events of vLLM's handler, which counts their tokens at its next output."""

    uncounted: list[int]

    @classmethod
    def of(cls, made: RequestState, events: TextEvents) -> Self:
        events.add_sequence()
        ours = _with_state_of(made, cls)
        ours.reader, ours.uncounted = events, []
        return ours

    def _read(self, ids: list[int], text: str) -> None:
        self.uncounted += ids
        self.reader.read(text)

    def _completed(self, output: Any) -> Any:
        if self.uncounted and output is not None:
            (sequence,) = output.outputs
            sequence.token_ids = [*self.uncounted, *sequence.token_ids]
            self.uncounted = []
        return output
