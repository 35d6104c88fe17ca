"""vLLM's output processor with counters, and what features put before it and before the engine.

The token lane reads `EngineCoreOutput`, which vLLM's Rust front end uses, too. In a release with
unknown fields there is no lane.
"""

import logging
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol, Self

from lmi_vllm.engine.base import DirectChunks, DirectEvents
from lmi_vllm.engine.vllm.chunks import ChunkMaker, VllmSequence, count_not_finite
from lmi_vllm.engine.vllm.names import (
    EngineCoreOutput,
    FastIncrementalDetokenizer,
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputKind,
)
from lmi_vllm.engine.vllm.uncounted import UncountedRequests
from lmi_vllm.engine.vllm.workarounds.aborted_requests import without_aborted
from lmi_vllm.engine.vllm.workarounds.prompt_ends import begin_after
from lmi_vllm.messages import GenerationJob, OpenAICall
from lmi_vllm.telemetry.records import current_record

logger = logging.getLogger(__name__)

# All fields of an output in vLLM 0.31 to 0.33; `error` (0.33) is set at an end.
KNOWN_FIELDS: Final = frozenset(
    {
        "request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors",
        "pooling_output", "finish_reason", "stop_reason", "events", "kv_transfer_params",
        "ec_transfer_params", "trace_headers", "prefill_stats", "routed_experts",
        "num_nans_in_logits", "mm_cache_miss_hashes", "new_sampling_mask", "spec_decode_metrics",
        "prompt_token_id_logprobs", "error",
    }
)  # fmt: skip
# Model settings with which outputs have more than tokens.
RICH_OUTPUT_SETTINGS: Final = ("return_sampling_mask", "enable_return_routed_experts")


class SequenceForm(NamedTuple):
    """How the outputs of a sequence are delivered: whole at its end, or as they come."""

    is_whole: bool
    is_fast: bool  # the tokenizers library makes its text, a token at a time


class DirectTexts(Protocol):
    """Makes the events of one OpenAI stream from its texts, without vLLM's handler."""

    def sequences(self) -> AbstractContextManager[None]:
        """Read the sequences that are added in the body."""
        ...

    def learn(self, event: bytes) -> None:
        """Read an event of the handler's, as a template for others."""
        ...


class TokenLane(Protocol):
    """Takes plain sequences from the engine's outputs, and keeps vLLM's state of them true."""

    def read_messages(self, decoder: Any) -> None:
        """Let vLLM's decoder of the engine's messages leave undecoded what is rarely read."""

    def of_job(
        self, job: GenerationJob, chunks: ChunkMaker, direct: DirectChunks | None
    ) -> AbstractContextManager[None]:
        """Read the job's sequences, which the body adds; their chunks may go to `direct`."""
        ...

    def texts_of(self, call: OpenAICall, handler: Any, direct: DirectEvents) -> DirectTexts | None:
        """Return the maker of events for `direct`; None if events may have more than text."""
        ...

    def add(self, state: Any, form: SequenceForm | None) -> None:
        """Register a new sequence; without a form vLLM handles all of it."""

    def take(self, outputs: list[Any], time: float, stats: Any, version: str | None) -> list[Any]:
        """Return the outputs of a step that the lane does not take."""
        ...

    def after_vllm(self, outputs: list[Any], time: float, known: Container[str]) -> None:
        """Called after vLLM has read outputs; sequences that are not `known` have ended."""

    def hand_over(self) -> None:
        """Update vLLM's state of every sequence with what the lane has taken."""

    def forget(self, numbers: Iterable[str]) -> None:
        """Leave these sequences to vLLM from now on."""


class EngineOutputs(OutputProcessor):  # type: ignore[misc,unused-ignore]
    """vLLM's output processor behind an optional lane; counts engine steps."""

    steps: int  # of the engine, whose outputs have arrived
    not_finite: int  # requests without an adapter whose logits were not finite
    report: Callable[[str], None] | None  # is called with the id of each request before the engine
    lane: TokenLane | None
    uncounted: UncountedRequests

    @classmethod
    def of(
        cls,
        made: OutputProcessor,
        lane: TokenLane | None = None,
        report: Callable[[str], None] | None = None,
    ) -> Self:
        """Return ours in place of one that has no request yet."""
        ours = cls.__new__(cls)
        ours.__dict__ = vars(made)
        ours.steps, ours.not_finite, ours.report, ours.lane = 0, 0, report, lane
        ours.uncounted = UncountedRequests()
        return ours

    def in_lane(
        self, job: GenerationJob, chunks: ChunkMaker, direct: DirectChunks | None
    ) -> AbstractContextManager[None]:
        """Let the lane, if there is one, take the sequences that the body adds for a job."""
        return nullcontext() if self.lane is None else self.lane.of_job(job, chunks, direct)

    def direct_texts(
        self, call: OpenAICall, handler: Any, direct: DirectEvents | None
    ) -> DirectTexts | None:
        """Return the maker of a stream's events; None leaves all to vLLM's handler."""
        if self.lane is None or direct is None:
            return None
        return self.lane.texts_of(call, handler, direct)

    def add_request(
        self,
        request: Any,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        """Add a sequence; every vLLM handler calls this in the context of its request."""
        number = request.request_id
        is_known = number in self.request_states
        is_uncounted = self.uncounted.note(number)
        super().add_request(request, prompt, parent_req, request_index, queue)
        if not is_known:
            state = self.request_states[number]
            begin_after(state.detokenizer, request.prompt_token_ids)
            if self.lane is not None:
                self.lane.add(state, None if is_uncounted else form_of(state))
            record = current_record()
            if record is not None:  # the sequences of one prompt (`n`) share it
                record.sequences.append(VllmSequence(state, has_prompt=request_index == 0))
        if self.report is not None:
            self.report(number)

    def process_outputs(
        self,
        engine_core_outputs: list[Any],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        **named: Any,
    ) -> Any:
        """As vLLM's, for the outputs that the lane leaves; counts logits that are not finite."""
        time, left = engine_core_timestamp or 0.0, engine_core_outputs
        if self.lane is not None:
            left = self.lane.take(left, time, iteration_stats, named.get("weight_version"))
            if not left:
                return OutputProcessorOutput(request_outputs=[], reqs_to_abort=[])
        for output in left:
            if output.num_nans_in_logits and (state := self.request_states.get(output.request_id)):
                self.not_finite += count_not_finite(state.lora_name)
        left = without_aborted(self, left)
        made = super().process_outputs(left, engine_core_timestamp, iteration_stats, **named)
        if self.lane is not None:
            self.lane.after_vllm(left, time, self.request_states)
        return made

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> Any:
        """As vLLM's, but a request ends only its own; vLLM first gets what the lane has taken.

        Clients choose the ids that are not internal, and two of them may choose the same.
        """
        given, record = tuple(request_ids), current_record()
        if not internal and record is not None and record.is_inference:
            sequences = (one for one in record.sequences if isinstance(one, VllmSequence))
            own, internal = {sequence.number for sequence in sequences}, True
            given = tuple(
                number
                for external in given
                for number in self.external_req_ids.get(external, ())
                if number in own
            )
        if self.lane is not None:
            for number in given:
                self.lane.forget((number,) if internal else self.external_req_ids.get(number, ()))
        return super().abort_requests(given, internal)

    def _update_stats_from_output(self, req_state: Any, *figures: Any) -> None:
        if req_state.request_id not in self.uncounted:
            super()._update_stats_from_output(req_state, *figures)

    def _update_stats_from_finished(self, req_state: Any, *figures: Any) -> None:
        if req_state.request_id not in self.uncounted:
            super()._update_stats_from_finished(req_state, *figures)

    def propagate_error(self, e: Exception) -> None:
        """As vLLM's; every sequence first gets what the lane has taken."""
        if self.lane is not None:
            self.lane.hand_over()
        super().propagate_error(e)

    def update_scheduler_stats(self, scheduler_stats: Any) -> None:
        """As vLLM's, called for each message of the engine: counts steps without tokens, too."""
        self.steps += 1
        super().update_scheduler_stats(scheduler_stats)


def form_of(state: Any) -> SequenceForm | None:
    """Return the form of a new sequence; None if a lane must not take it.

    vLLM handles outputs of several sequences (`n`).
    """
    kind = state.output_kind
    if (
        state.detokenizer is None
        or state.parent_req is not None
        or state.streaming_input
        or kind not in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA)
    ):
        return None
    is_fast = type(state.detokenizer) is FastIncrementalDetokenizer
    return SequenceForm(kind is RequestOutputKind.FINAL_ONLY, is_fast)


def may_be_used(model_config: Any) -> bool:
    """Whether the lane knows this release's output fields and this model; warns if not."""
    if more := sorted(set(EngineCoreOutput.__struct_fields__) - KNOWN_FIELDS):
        logger.warning("the token lane is off: this vLLM's outputs also have %s", ", ".join(more))
        return False
    return not any(getattr(model_config, name, False) for name in RICH_OUTPUT_SETTINGS)
