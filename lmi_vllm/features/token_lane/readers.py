"""Who reads a stream's tokens where they arrive, and what the lane may do with a request."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from lmi_vllm.engine.base import DirectChunks, DirectEvents
from lmi_vllm.engine.vllm.chunks import ChunkMaker, finite
from lmi_vllm.messages import GenerationChunk


class SampledLogprob(NamedTuple):
    """The log probability of a sampled token, as vLLM's `Logprob` without the token's text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class TokenReader(Protocol):
    """Reads a stream's tokens where they arrive."""

    @property
    def gate(self) -> DirectChunks | DirectEvents:
        """What knows whether tokens may come."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it knows how to write a token."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `read_token` does not take."""
        ...

    def read(self, ids: list[int], text: str, logprobs: list[float] | None) -> None:
        """Take the tokens of a step, which together have this text; only while it is open."""
        ...

    def read_token(self, token: int, text: str, logprob: float | None) -> None:
        """Take the only token of a step, the usual case; only while it is open."""
        ...

    def read_tokens(self, ids: list[int], texts: list[str], logprobs: list[float] | None) -> None:
        """As `read`, for tokens that each have a text of their own."""
        ...


class ChunkReader:
    """Hands tokens on as chunks of ours."""

    __slots__ = ("_chunks", "_direct", "gate", "read_token", "special_ids")
    is_ready = True

    def __init__(self, direct: DirectChunks, chunks: ChunkMaker) -> None:
        self._direct = self.gate = direct
        self._chunks = chunks
        self.special_ids = chunks.special_ids
        self.read_token = direct.read_token

    def read(self, ids: list[int], text: str, logprobs: list[float] | None) -> None:
        """See `TokenReader`."""
        if len(ids) == 1 and ids[0] not in self.special_ids:
            self.read_token(ids[0], text, None if logprobs is None else finite(logprobs[0]))
            return
        entries = None
        if logprobs is not None:
            pairs = zip(ids, logprobs, strict=True)
            entries = [{token: SampledLogprob(value)} for token, value in pairs]
        tokens = self._chunks.tokens(ids, text, entries)
        self._direct.read_chunk(GenerationChunk(0, tokens, text))

    def read_tokens(self, ids: list[int], texts: list[str], logprobs: list[float] | None) -> None:
        """See `TokenReader`."""
        self._direct.read_tokens(ids, texts, logprobs and [*map(finite, logprobs)])


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """What the lane may do with the sequences of a request, if there is only one."""

    reader: TokenReader | None = None
    has_sampled_logprobs_only: bool = False
    counted: Callable[[], None] | None = None  # is called for each sequence that is added


CURRENT: Final[ContextVar[LaneRequest | None]] = ContextVar("lmi_vllm_lane", default=None)


class InLane:
    """The sequences that are added by the body, in this context, are those of the request."""

    __slots__ = ("_request", "_token")

    def __init__(self, request: LaneRequest | None) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._token = CURRENT.set(self._request)

    def __exit__(self, *_: object) -> None:
        CURRENT.reset(self._token)
