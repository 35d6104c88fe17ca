"""Tokens of a stream from vLLM's output loop to their reader, with no queue and no task in between.

For each token vLLM makes a `RequestOutput`, puts it into a queue and wakes the task that waits
there, which hands it up through a generator for each layer. A reader that wants nothing but the
next token is called instead, from the output loop itself. Everything else goes vLLM's way: the
first and the last output, errors, aborts, and whatever comes while the reader is busy or its client
reads slowly (vLLM joins what waits). Stop strings, counters and metrics come before, for both ways.

The log probability of the sampled token alone is converted without vLLM's detour, which decodes the
token once more and costs more than all the rest of a token (DECISIONS.md 48).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from vllm.logprobs import Logprob
from vllm.v1.engine.logprobs import LogprobsProcessor

from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.engine.vllm_chunks import ChunkMaker, finite
from lmi_vllm.messages import GenerationChunk


@dataclass(frozen=True, slots=True)
class DirectRequest:
    """How the next sequence that is added in this context is treated."""

    chunks: ChunkMaker
    direct: DirectChunks | None = None
    has_sampled_logprobs_only: bool = False


_CURRENT: Final[ContextVar[DirectRequest | None]] = ContextVar("lmi_vllm_direct", default=None)


@contextmanager
def direct_request(request: DirectRequest | None) -> Iterator[None]:
    """Let the sequences that are added by the body, in this context, be read directly."""
    token = _CURRENT.set(request)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def read_directly(processor: Any) -> None:
    """Let vLLM's output processor call the readers of `direct_request`."""
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
        if direct.direct is not None and parent_req is None and state.stream_interval == 1:
            state.make_request_output = _DirectOutputs(state, direct.chunks, direct.direct)

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

    __slots__ = ("_chunks", "_detokenizer", "_direct", "_logprobs", "_make", "_queue")

    def __init__(self, state: Any, chunks: ChunkMaker, direct: DirectChunks) -> None:
        self._make: Callable[..., Any] = state.make_request_output
        self._queue = state.queue
        self._detokenizer = state.detokenizer
        self._logprobs = state.logprobs_processor
        self._chunks = chunks
        self._direct = direct

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
            or not self._direct.is_open
        ):
            return self._make(new_token_ids, pooling_output, finish_reason, *more, **named)
        try:
            self._read(new_token_ids)
        except Exception as error:  # noqa: BLE001 (ends this request; vLLM's loop goes on)
            self._queue.put(error)
        return None

    def _read(self, ids: list[int]) -> None:
        text = self._detokenizer.get_next_output_text(False, True)
        found = self._logprobs.logprobs
        if len(ids) == 1 and self._chunks.is_ordinary(token := ids[0]):
            logprob = None if found is None else finite(found[-1][token].logprob)
            self._direct.read_token(token, text, logprob)
            return
        logprobs = None if found is None else found[-len(ids) :]
        tokens = self._chunks.tokens(ids, text, logprobs)
        self._direct.read_chunk(GenerationChunk(0, tokens, text))
