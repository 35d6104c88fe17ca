"""Tokens of a stream from vLLM's output loop to their reader, with no queue and no task in between.

For each token vLLM makes a `RequestOutput`, puts it into a queue and wakes the task that waits
there, which hands it up through a generator for each layer. A reader that wants nothing but the
next token is called instead, from the output loop itself. Everything else goes vLLM's way: the
first and the last output, errors, aborts, and whatever comes while the reader is busy or its client
reads slowly (vLLM joins what waits). Stop strings, counters and metrics come before, for both ways.

The log probability of the sampled token alone is converted without vLLM's detour, which decodes the
token once more and costs more than all the rest of a token (DECISIONS.md 48).
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from vllm.logprobs import Logprob
from vllm.v1.engine.logprobs import LogprobsProcessor

from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.engine.vllm.chunks import ChunkMaker, finite
from lmi_vllm.engine.vllm.events import TextEvents
from lmi_vllm.messages import GenerationChunk


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


def read_directly(processor: Any) -> None:
    """Let vLLM's output processor call the readers of `ReadDirectly`."""
    add = processor.add_request

    def add_request(
        request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        add(request, prompt, parent_req, request_index, queue)
        direct = _CURRENT.get()
        state = processor.request_states.get(request.request_id)
        if direct is None or state is None:
            return
        if direct.has_sampled_logprobs_only and type(state.logprobs_processor) is LogprobsProcessor:
            state.logprobs_processor.__class__ = SampledLogprobs
        # A step that is held back (`stream_interval`) or shared (`n`) stays vLLM's business.
        if parent_req is not None or state.stream_interval != 1:
            return
        if direct.direct is not None and direct.chunks is not None:
            state.make_request_output = _DirectChunks(state, direct.chunks, direct.direct)
        elif direct.events is not None:
            direct.events.add_sequence()
            state.make_request_output = _DirectTexts(state, direct.events)

    processor.add_request = add_request


class SampledLogprobs(LogprobsProcessor):  # type: ignore[misc,unused-ignore]
    """vLLM's log probabilities of a sequence, of the sampled tokens alone and without texts.

    Takes the place of the class of an object of vLLM's, so that its fields stay as they are.
    """

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        """Add the new tokens; the sampler puts the sampled one first."""
        for tokens, values, rank in zip(*logprobs_lists[:3], strict=False):
            value = values.item(0)
            self.cumulative_logprob += value
            self.logprobs.append({tokens.item(0): Logprob(value, rank, None)})


class _DirectOutputs:
    """Stands before `RequestState.make_request_output`, which goes on to make all other outputs."""

    __slots__ = ("_detokenizer", "_make", "_queue", "_reader")

    def __init__(self, state: Any, reader: DirectChunks | TextEvents) -> None:
        self._make: Callable[..., Any] = state.make_request_output
        self._queue = state.queue
        self._detokenizer = state.detokenizer
        self._reader = reader

    def __call__(
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
            or self._queue.output is not None  # what waits there comes first
            or not self._reader.is_open
        ):
            output = self._make(new_token_ids, pooling_output, finish_reason, *more, **named)
            return self._completed(output)
        try:
            self._read(new_token_ids, self._detokenizer.get_next_output_text(False, True))
        except Exception as error:  # noqa: BLE001 (ends this request; vLLM's loop goes on)
            self._queue.put(error)
        return None

    def _read(self, ids: list[int], text: str) -> None:
        raise NotImplementedError

    def _completed(self, output: Any) -> Any:
        return output


class _DirectChunks(_DirectOutputs):
    """Hands tokens on as chunks of ours."""

    __slots__ = ("_chunks", "_direct", "_has_more", "_logprobs", "_special")

    def __init__(self, state: Any, chunks: ChunkMaker, direct: DirectChunks) -> None:
        super().__init__(state, direct)
        self._direct = direct
        self._logprobs = state.logprobs_processor
        self._chunks = chunks
        self._has_more = chunks.count != 0
        self._special = chunks.special_ids

    def _read(self, ids: list[int], text: str) -> None:
        found = self._logprobs.logprobs
        if len(ids) == 1 and not self._has_more and (token := ids[0]) not in self._special:
            logprob = None if found is None else finite(found[-1][token].logprob)
            self._direct.read_token(token, text, logprob)
            return
        logprobs = None if found is None else found[-len(ids) :]
        tokens = self._chunks.tokens(ids, text, logprobs)
        self._direct.read_chunk(GenerationChunk(0, tokens, text))


class _DirectTexts(_DirectOutputs):
    """Hands texts on as events of vLLM's handler, which counts their tokens at its next output."""

    __slots__ = ("_events", "_uncounted")

    def __init__(self, state: Any, events: TextEvents) -> None:
        super().__init__(state, events)
        self._events = events
        self._uncounted: list[int] = []

    def _read(self, ids: list[int], text: str) -> None:
        self._uncounted += ids
        self._events.read(text)

    def _completed(self, output: Any) -> Any:
        if self._uncounted and output is not None:
            (sequence,) = output.outputs
            sequence.token_ids = [*self._uncounted, *sequence.token_ids]
            self._uncounted = []
        return output
