"""The `Engine` protocol: the interface between request handling and a token generator.

Each promise below has a contract test that runs over every engine (`tests/contract/`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from lmi_vllm.errors import EngineMemoryError, EngineStartError
from lmi_vllm.messages import (
    AdapterRef,
    GenerationChunk,
    GenerationJob,
    HttpCall,
    HttpRoute,
    OpenAICall,
    OpenAIReply,
    PromptToken,
)

# Texts of torch and vLLM (v1/core/kv_cache_utils.py, v1/worker/*.py) when memory is short. Their
# classes say less: vLLM raises ValueError, and an engine's own process passes on a text.
_NO_MEMORY: Final = (
    "out of memory", "outofmemory", "memoryerror", "can't allocate memory", "no available memory",
    "not enough memory", "not enough gpu memory", "less than requested memory",
    "less than desired gpu memory", "less than desired cpu memory",
    "larger than the available kv cache memory",
)  # fmt: skip


def lacks_memory(text: str) -> bool:
    """Whether this text of torch or vLLM says that memory is short."""
    return any(words in text.lower() for words in _NO_MEMORY)


def start_error(text: str) -> EngineStartError:
    """Return the error of a failed start, from the text of torch or vLLM."""
    return (EngineMemoryError if lacks_memory(text) else EngineStartError)(text)


class DirectChunks(Protocol):
    """Reads chunks where they are made, without a task in between."""

    @property
    def is_open(self) -> bool:
        """Whether a chunk may be passed."""
        ...

    def read_chunk(self, chunk: GenerationChunk) -> None:
        """Take a chunk; only while it is open."""
        ...

    def read_token(self, token: int, text: str, logprob: float | None) -> None:
        """Take the chunk of one ordinary token, the usual case; only while it is open."""
        ...

    def read_tokens(self, ids: list[int], texts: list[str], logprobs: list[float] | None) -> None:
        """Take the chunk of several ordinary tokens; only while it is open."""
        ...


class DirectEvents(Protocol):
    """Reads events of an OpenAI stream where their text is made, without a task in between."""

    @property
    def is_open(self) -> bool:
        """Whether an event may be passed."""
        ...

    def read_event(self, event: bytes) -> None:
        """Take an event; only while it is open."""
        ...


class OtherClients:
    """Sums over the other clients of an engine; this base class has none."""

    @property
    def running_requests(self) -> int:
        """Their requests in the engine."""
        return 0

    @property
    def steps(self) -> int:
        """Sum of the engine steps that they have seen."""
        return 0

    @property
    def not_finite(self) -> int:
        """Number of their requests to the base model with NaN or infinite logits."""
        return 0


@dataclass(frozen=True, slots=True)
class EngineClient:
    """One client of an engine that has several: its addresses.

    `index` is its number among `count`; 0 is the one that started the engine, which counts the
    `others`, too. `base_adapter` is the path of the adapter of base requests, if they need one.
    """

    index: int
    count: int
    input_address: str
    output_address: str
    stats_address: str | None = None  # of the coordinator of data-parallel engines
    base_adapter: str = ""
    others: OtherClients = field(default_factory=OtherClients)


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """An adapter that the workers hold, with a slot or in main memory only."""

    name: str
    has_slot: bool = False
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class ActiveAdapters:
    """Adapters of requests, by name: in a slot of the engine, pinned, or waiting for a slot.

    `ranks` has what the workers of each data-parallel rank held when they were last asked. `model`
    is the model's name in the engine's own metrics: the first that requests use. `queued` requests
    wait for a slot, and the engine's metrics do not count them.
    """

    slots: int = 0  # 0: the engine has no LoRA
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    ranks: tuple[tuple[ResidentAdapter, ...], ...] = ()
    model: str = ""
    queued: int = 0


class HttpApplication(Protocol):
    """An engine's own HTTP application, to which this server forwards requests."""

    @property
    def routes(self) -> Sequence[HttpRoute]:
        """The routes that may be forwarded."""
        ...

    @property
    def sees_every_request(self) -> bool:
        """Whether it must get every OpenAI request: to count them, or for middleware."""
        ...

    def change(self, change: Callable[[Any], object]) -> None:
        """Have code of the user's change it before any request; `/invocations` is its own then."""
        ...

    def find(self, method: str, path: str) -> HttpRoute | None:
        """Return the route of a request; also if only the method is wrong."""
        ...

    async def is_asleep(self) -> bool:
        """Whether a call has put the engine to sleep or paused it; False if that is not known."""
        ...

    async def call(self, call: HttpCall, direct: DirectEvents | None = None) -> OpenAIReply:
        """Return the answer; one that is not complete at once is a stream.

        While `direct` is open, events go there instead of into the stream.

        Raises:
            EngineDeadError: the engine is gone.
            EngineFailureError: the application itself failed.
        """
        ...


class EngineGrammars(Protocol):
    """Watches the grammars of a scheduler's requests, in the engine."""

    def bitmask(self, compute: Callable[[Any], Any], scheduled: Any) -> Any:
        """Return what the scheduler computes for a step."""
        ...

    def faulty(self, running: Collection[str]) -> dict[str, str]:
        """Return the requests that are to end, and why; some have not run yet."""
        ...


# How the reason begins why an answer ended for which the client's constraint is to blame.
GRAMMAR_FAULT: Final = "the schema, regular expression or grammar "

# Raises vLLM's error if the engine may not compile a schema, regular expression or grammar (in
# vLLM's form), for an answer of that many tokens to that client.
CheckGrammar = Callable[[Any, int | None, str], Awaitable[None]]
GRAMMAR_SOURCE: Final = "lmi_source"  # that client, in `extra_args` of vLLM's sampling parameters


class EngineProcess(Protocol):
    """The calls of health checks and watchdogs: liveness, progress, end."""

    @property
    def running_requests(self) -> int:
        """Requests in the engine, running and waiting."""
        ...

    @property
    def progress(self) -> int:
        """A number that grows with every completed step, and does not change during a stall."""
        ...

    async def check_health(self) -> None:
        """Return quickly if the engine is alive.

        Raises:
            EngineDeadError: the engine is gone.
        """
        ...

    async def log_statistics(self) -> None:
        """Log throughput and load since the last call; an idle engine logs nothing."""
        ...

    async def wait_until_dead(self) -> str:
        """Return what has ended, and how, once the engine has ended without a call of `close`."""
        ...

    async def kill(self) -> bool:
        """End an engine that hangs, without its help; its waiting calls fail.

        Returns whether it has really ended. `close` still has to be called.
        """
        ...

    async def close(self) -> None:
        """End the engine and all its processes; may be called twice."""
        ...


class Engine(EngineProcess, Protocol):
    """Generates tokens, answers OpenAI calls and holds adapters."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        ...

    @property
    def not_finite(self) -> int:
        """Requests without an adapter that failed with NaN or infinite numbers."""
        ...

    @property
    def active_adapters(self) -> ActiveAdapters:
        """The adapters that requests run on or wait for, also those of other clients."""
        ...

    async def read_adapters(self) -> None:
        """Ask the workers which adapters they hold, if that may have changed.

        Raises:
            EngineDeadError: the engine is gone.
        """
        ...

    @property
    def task(self) -> str:
        """What the loaded model does: `generate`, or a pooling task such as `embed`."""
        ...

    @property
    def http(self) -> HttpApplication | None:
        """The engine's own HTTP application; None if it has none."""
        ...

    @property
    def openapi(self) -> Mapping[str, Any]:
        """An OpenAPI document of what its handlers read and answer; slow at the first call."""
        ...

    def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncIterator[GenerationChunk]:
        """Yield the chunks of `job`; each sequence ends with a finish reason.

        While `direct` is open it may get chunks instead. Direct and yielded chunks are in order.
        The first and the last chunk of a stream are always yielded. Closing the iterator, or
        cancelling its consumer, frees the request within a second.

        Raises:
            PayloadError: the job itself is at fault (prompt too long, bad sampling value).
            EngineDeadError: the engine is gone; also while iterating.
        """
        ...

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[PromptToken]:
        """Return the tokens of `text`, each with its characters."""
        ...

    async def answer_openai(
        self, call: OpenAICall, direct: DirectEvents | None = None
    ) -> OpenAIReply:
        """Answer with vLLM's own OpenAI bytes; errors of the request are replies, not exceptions.

        While `direct` is open it may get events of the stream instead, in order.

        Raises:
            EngineDeadError: the engine is gone.
        """
        ...

    def uncounted(self) -> AbstractContextManager[None]:
        """Leave what is asked in the body out of the engine's own metrics; others are counted."""
        ...

    async def sleep(self, level: int) -> None:
        """Give memory back, while there is no request: vLLM's level 1 or 2.

        Raises:
            EngineFailureError: this engine cannot.
            EngineDeadError: the engine is gone.
        """
        ...

    async def wake_up(self, level: int) -> None:
        """Take back the memory that `sleep` of this level has given; the caches are empty.

        After level 2 the weights have been read again, and no adapter is loaded.

        Raises:
            EngineFailureError: it cannot.
            EngineDeadError: the engine is gone.
        """
        ...

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Make `adapter` usable, for OpenAI calls by its name, too.

        Raises:
            AdapterRefusedError: it cannot be loaded; nothing of it stays behind.
        """
        ...

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Unload `adapter` and its weights; unknown ones are ignored."""
        ...

    @property
    def tokenizer(self) -> object:
        """The model's tokenizer; None if there is none. Copy it for use in another thread."""
        ...
