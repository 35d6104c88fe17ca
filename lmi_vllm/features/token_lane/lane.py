"""Tokens of plain sequences go from the engine's outputs straight to their readers.

vLLM's output processor makes a `RequestOutput` of each token and puts it into a queue. A task waits
there, and passes it up through a generator for each layer. Nearly every token needs none of that,
because its sequence is plain: text in and text out, with no log probability but that of the sampled
token. The lane takes these from the engine's outputs before vLLM reads them. A stream's reader is
called at once. Of an answer that is wanted whole only the tokens are kept.

The lane takes only the middle of a sequence. It hands over before the first and the last output, an
output with more than tokens, a stop string, and a busy or slow reader. At each of these vLLM's own
state of the sequence is brought up to date, and vLLM goes on as if it had seen every token. With
`stream_interval` a reader gets the tokens of several steps together. What vLLM counts per step is
counted here once per step.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from lmi_vllm.engine.base import DirectChunks, DirectEvents
from lmi_vllm.engine.vllm.chunks import ChunkMaker
from lmi_vllm.engine.vllm.outputs import SequenceForm
from lmi_vllm.features.token_lane.decoding import Pieces, TableText, tables_for
from lmi_vllm.features.token_lane.events import EventFrames, TextEvents, may_be_direct, shape_of
from lmi_vllm.features.token_lane.logprobs import LazyDecoder, has_known_arrays
from lmi_vllm.features.token_lane.readers import CURRENT, ChunkReader, InLane, LaneRequest
from lmi_vllm.features.token_lane.sequences import (
    IntervalSequence,
    LaneSequence,
    SparseSequence,
    StreamedSequence,
    TableSequence,
    WholeSequence,
)
from lmi_vllm.messages import GenerationJob, OpenAICall


class PlainLane:
    """The lane of one engine; see `TokenLane`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tables = tables_for(tokenizer)
        self._sequences: dict[str, LaneSequence] = {}
        self._frames = EventFrames()
        self._weight_version: str | None = None

    def read_messages(self, decoder: Any) -> None:
        """See `TokenLane`."""
        if has_known_arrays():
            decoder.decoder = LazyDecoder(decoder)

    def of_job(self, job: GenerationJob, chunks: ChunkMaker, direct: DirectChunks | None) -> InLane:
        """See `TokenLane`; a beam search adds sequences of its own, which are vLLM's."""
        if job.beams is not None:
            return InLane(None)
        reader = ChunkReader(direct, chunks) if direct is not None and job.is_streaming else None
        has_sampled_only = job.sampling.get("logprobs") == 0
        return InLane(LaneRequest(reader, has_sampled_logprobs_only=has_sampled_only))

    def texts_of(self, call: OpenAICall, handler: Any, direct: DirectEvents) -> TextEvents | None:
        """See `TokenLane`."""
        if not may_be_direct(call.kind, call.body, handler):
            return None
        return TextEvents(direct, self._frames, shape_of(call.kind, call.body))

    def add(self, state: Any, form: SequenceForm | None) -> None:
        """See `TokenLane`."""
        wanted = CURRENT.get()
        if wanted is not None and wanted.counted is not None:
            wanted.counted()
        sequence = None if form is None else lane_sequence(state, form, wanted, self._tables)
        if sequence is not None:
            self._sequences[state.request_id] = sequence

    def take(self, outputs: list[Any], time: float, stats: Any, version: str | None) -> list[Any]:
        """Return the outputs of a step that are not the lane's."""
        sequences = self._sequences
        if version != self._weight_version:
            self._weight_version = version
            self.hand_over()  # vLLM notes where in each sequence that was
            return outputs
        left, tokens, latencies = [], 0, []
        for output in outputs:
            sequence = sequences.get(output.request_id)
            if sequence is None or not sequence.take(output):
                left.append(output)
                continue
            tokens += len(output.new_token_ids)
            latencies.append(time - sequence.time)
            sequence.time = time
        if stats is not None and tokens:
            stats.num_generation_tokens += tokens
            stats.inter_token_latencies_iter += latencies
        return left

    def after_vllm(self, outputs: list[Any], time: float, known: Container[str]) -> None:
        """See `TokenLane`."""
        for output in outputs:
            if (sequence := self._sequences.get(output.request_id)) is not None:
                sequence.after_vllm(time)
                if output.request_id not in known:
                    del self._sequences[output.request_id]

    def hand_over(self) -> None:
        """See `TokenLane`."""
        for sequence in self._sequences.values():
            sequence.hand_over()

    def forget(self, numbers: Iterable[str]) -> None:
        """See `TokenLane`."""
        for number in numbers:
            if (sequence := self._sequences.pop(number, None)) is not None:
                sequence.hand_over()


def lane_sequence(
    state: Any,
    form: SequenceForm,
    request: LaneRequest | None,
    tables: Mapping[bool, Pieces] | None,
) -> LaneSequence | None:
    """Return the lane's state of a new sequence; None where vLLM handles all of it."""
    logprobs = state.logprobs_processor.logprobs
    is_plain = request is not None and request.has_sampled_logprobs_only
    if logprobs is not None and not (is_plain and type(logprobs) is list):
        return None
    pieces = _pieces_of(state.detokenizer, form, tables)
    reader = None if request is None or form.is_whole else request.reader
    is_joined = state.stream_interval > 1
    if getattr(state.detokenizer, "stop", ()) and (reader is None or pieces is None or is_joined):
        return None  # a stop string may end between two deliveries
    if form.is_whole:
        return WholeSequence(state, pieces)
    if reader is not None and pieces is not None:
        kind = IntervalSequence if is_joined else TableSequence
        return kind(state, reader, TableText(state.detokenizer, pieces))
    if is_joined:
        return SparseSequence(state, pieces)
    return None if reader is None else StreamedSequence(state, reader)


def _pieces_of(
    detokenizer: Any, form: SequenceForm, tables: Mapping[bool, Pieces] | None
) -> Pieces | None:
    """Return the table of a sequence; None where vLLM's own detokenizer says something else."""
    if tables is None or not form.is_fast or not detokenizer.spaces_between_special_tokens:
        return None
    return tables[detokenizer.skip_special_tokens]
