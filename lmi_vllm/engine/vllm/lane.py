"""The token lane: what the engine says of plain sequences, straight to those who read it.

vLLM's output processor makes a `RequestOutput` of each token, puts it into a queue and wakes the
task that waits there, which hands it up through a generator for each layer. Nearly every token
needs none of that: of a sequence of its own, text in and text out, with no log probability but that
of the sampled token. The lane takes these from the engine's outputs before vLLM looks at them: a
stream's reader is called at once, and of an answer that is wanted whole only the tokens are kept.

It takes nothing but the middle of a sequence. The first output, the last, whatever carries more
than tokens, a stop string, a reader that is busy or slow: before any of these the lane hands over
(vLLM's own state of the sequence is brought up to date) and vLLM goes on, as if it had seen every
token. What it counts per step is counted here once per step.

`EngineCoreOutput` is the seam, which vLLM's Rust front end depends on too: in a release whose
structure is not known here the lane stays off.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Self

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

from lmi_vllm.engine.vllm.chunks import SequenceWork, count_not_finite
from lmi_vllm.engine.vllm.decoding import Pieces, TableText, tables_for
from lmi_vllm.engine.vllm.sequences import (
    LaneRequest,
    LaneSequence,
    StreamedSequence,
    TableSequence,
    WholeSequence,
)
from lmi_vllm.telemetry.records import current_record

logger = logging.getLogger(__name__)

# All that an output may say in vLLM 0.31 to 0.33; `error` (0.33) comes with an end.
KNOWN_FIELDS: Final = frozenset(
    {
        "request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors",
        "pooling_output", "finish_reason", "stop_reason", "events", "kv_transfer_params",
        "ec_transfer_params", "trace_headers", "prefill_stats", "routed_experts",
        "num_nans_in_logits", "mm_cache_miss_hashes", "new_sampling_mask", "spec_decode_metrics",
        "prompt_token_id_logprobs", "error",
    }
)  # fmt: skip
# Model settings with which each output says more than its tokens.
TELLING_SETTINGS: Final = ("return_sampling_mask", "enable_return_routed_experts")


_CURRENT: Final[ContextVar[LaneRequest | None]] = ContextVar("lmi_vllm_lane", default=None)


class InLane:
    """The sequences that are added by the body, in this context, are those of the request."""

    __slots__ = ("_request", "_token")

    def __init__(self, request: LaneRequest | None) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self._request)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


class TokenLane(OutputProcessor):  # type: ignore[misc,unused-ignore]
    """vLLM's output processor, before which the lane takes what it can; it counts steps, too."""

    steps: int  # of the engine, as far as their outputs have arrived
    not_finite: int  # requests without an adapter whose logits were not
    report: Callable[[str], None] | None  # is called with the id of each request before the engine
    is_on: bool
    _sequences: dict[str, LaneSequence]
    _tables: Mapping[bool, Pieces] | None
    _weight_version: str | None

    @classmethod
    def of(cls, made: OutputProcessor) -> Self:
        """Return ours in place of one that has no request yet."""
        ours = cls.__new__(cls)
        ours.__dict__ = vars(made)
        ours.steps, ours.not_finite, ours.report = 0, 0, None
        ours.is_on, ours._sequences, ours._weight_version = False, {}, None
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
            state = self.request_states[number]
            wanted = _CURRENT.get()
            if wanted is not None and wanted.counted is not None:
                wanted.counted()
            sequence = lane_sequence(state, wanted, self._tables) if self.is_on else None
            if sequence is not None:
                self._sequences[number] = sequence
            record = current_record()
            if record is not None:  # the sequences of one prompt (`n`) share it
                record.work.append(SequenceWork(state, has_prompt=request_index == 0))
        if self.report is not None:
            self.report(number)

    def process_outputs(
        self,
        engine_core_outputs: list[Any],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        **named: Any,
    ) -> Any:
        """As vLLM's, of what the lane leaves; counts requests whose logits were not finite."""
        time = engine_core_timestamp or 0.0
        left = self._take(engine_core_outputs, time, iteration_stats, named.get("weight_version"))
        if not left:
            return OutputProcessorOutput(request_outputs=[], reqs_to_abort=[])
        for output in left:
            if output.num_nans_in_logits and (state := self.request_states.get(output.request_id)):
                self.not_finite += count_not_finite(state.lora_name)
        made = super().process_outputs(left, engine_core_timestamp, iteration_stats, **named)
        for output in left:
            if (sequence := self._sequences.get(output.request_id)) is not None:
                sequence.after_vllm(time)
                if output.request_id not in self.request_states:
                    del self._sequences[output.request_id]
        return made

    def _take(self, outputs: list[Any], time: float, stats: Any, version: str | None) -> list[Any]:
        """Return the outputs of a step that are not the lane's."""
        sequences = self._sequences
        if version != self._weight_version:
            self._weight_version = version
            self._hand_over(tuple(sequences))  # vLLM notes where in each sequence that was
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

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> Any:
        """As vLLM's, which counts and says what the lane has taken."""
        given = tuple(request_ids)
        for number in given:
            ours = (number,) if internal else tuple(self.external_req_ids.get(number, ()))
            self._hand_over(ours)
            for one in ours:
                self._sequences.pop(one, None)
        return super().abort_requests(given, internal)

    def propagate_error(self, e: Exception) -> None:
        """As vLLM's, with every sequence as far as it came."""
        self._hand_over(tuple(self._sequences))
        super().propagate_error(e)

    def update_scheduler_stats(self, scheduler_stats: Any) -> None:
        """As vLLM's, called for each message of the engine: counts steps without tokens, too."""
        self.steps += 1
        super().update_scheduler_stats(scheduler_stats)

    def _hand_over(self, numbers: Iterable[str]) -> None:
        for number in numbers:
            sequence = self._sequences.get(number)
            if sequence is not None:
                sequence.hand_over()


def is_known_release() -> bool:
    """Whether an output of the engine says nothing that the lane has not heard of."""
    return frozenset(EngineCoreOutput.__struct_fields__) <= KNOWN_FIELDS


def may_be_used(model_config: Any) -> bool:
    """Whether the lane knows this release and what this model's outputs say; warns where not."""
    if not is_known_release():
        more = ", ".join(sorted(set(EngineCoreOutput.__struct_fields__) - KNOWN_FIELDS))
        logger.warning("the token lane is off: this vLLM's outputs also have %s", more)
        return False
    return not any(getattr(model_config, name, False) for name in TELLING_SETTINGS)


def lane_sequence(
    state: Any, request: LaneRequest | None, tables: Mapping[bool, Pieces] | None
) -> LaneSequence | None:
    """Return the lane's side of a new sequence; None where all of it is vLLM's business."""
    # A step that is held back (`stream_interval`) or shared (`n`) stays there.
    if (
        state.detokenizer is None
        or state.parent_req is not None
        or state.stream_interval != 1
        or state.streaming_input
    ):
        return None
    logprobs = state.logprobs_processor.logprobs
    is_plain = request is not None and request.has_sampled_logprobs_only
    if logprobs is not None and not (is_plain and type(logprobs) is list):
        return None
    pieces = _pieces_of(state.detokenizer, tables)
    has_stops = bool(getattr(state.detokenizer, "stop", ()))
    if state.output_kind is RequestOutputKind.FINAL_ONLY:
        return None if has_stops else WholeSequence(state, pieces)
    reader = None if request is None else request.reader
    if state.output_kind is not RequestOutputKind.DELTA or reader is None:
        return None
    if pieces is not None:
        return TableSequence(state, reader, TableText(state.detokenizer, pieces))
    return None if has_stops else StreamedSequence(state, reader)


def _pieces_of(detokenizer: Any, tables: Mapping[bool, Pieces] | None) -> Pieces | None:
    """Return the table of a sequence; None where vLLM's own detokenizer says something else."""
    is_fast = type(detokenizer) is FastIncrementalDetokenizer
    if tables is None or not is_fast or not detokenizer.spaces_between_special_tokens:
        return None
    return tables[detokenizer.skip_special_tokens]
