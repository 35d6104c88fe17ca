"""The `Engine` protocol: the one seam between request handling and a token generator.

Each promise below has a contract test that runs over every engine (`tests/contract/`).
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lmi_vllm.errors import EngineMemoryError, EngineStartError
from lmi_vllm.messages import (
    AdapterRef,
    GenerationChunk,
    GenerationJob,
    HttpCall,
    HttpRoute,
    MediaPolicy,
    OpenAICall,
    OpenAIReply,
    OpenAISchemas,
    PromptToken,
)

# What torch and vLLM (v1/core/kv_cache_utils.py, v1/worker/*.py) say where memory is short.
_NO_MEMORY: Final = (
    "out of memory", "outofmemory", "memoryerror", "can't allocate memory", "no available memory",
    "not enough memory", "not enough gpu memory", "less than requested memory",
    "less than desired gpu memory", "less than desired cpu memory",
    "larger than the available kv cache memory",
)  # fmt: skip


def start_error(text: str) -> EngineStartError:
    """Return the error of a start that failed so, in the words of torch or vLLM."""
    is_memory = any(words in text.lower() for words in _NO_MEMORY)
    return (EngineMemoryError if is_memory else EngineStartError)(text)


class DirectChunks(Protocol):
    """Reads chunks of a stream where they are made, with no task in between."""

    @property
    def is_open(self) -> bool:
        """Whether a chunk may come now."""
        ...

    def read_chunk(self, chunk: GenerationChunk) -> None:
        """Take a chunk; only while it is open."""
        ...

    def read_token(self, token: int, text: str, logprob: float | None) -> None:
        """Take the chunk of one ordinary token, which most are; only while it is open."""
        ...


class DirectEvents(Protocol):
    """Reads events of an OpenAI stream where their text is made, with no task in between."""

    @property
    def is_open(self) -> bool:
        """Whether an event may come now."""
        ...

    def read_event(self, event: bytes) -> None:
        """Take an event; only while it is open."""
        ...


class OtherClients(Protocol):
    """The sums over the other clients of an engine."""

    @property
    def running_requests(self) -> int:
        """Requests that they have in the engine."""
        ...

    @property
    def steps(self) -> int:
        """Engine steps that they have observed, summed."""
        ...

    @property
    def not_finite(self) -> int:
        """Their requests to the base model that had NaN or infinite logits."""
        ...


@dataclass(frozen=True, slots=True)
class _NoOthers:
    running_requests: int = 0
    steps: int = 0
    not_finite: int = 0


NO_OTHERS: Final = _NoOthers()


@dataclass(frozen=True, slots=True)
class ActiveAdapters:
    """The adapters of requests, by name: in a slot of the engine, as pinned ones, or waiting."""

    slots: int = 0  # 0: the engine takes no adapters
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class HttpApplication(Protocol):
    """An HTTP application that an engine brings: routes that this server hands on to it."""

    @property
    def routes(self) -> Sequence[HttpRoute]:
        """Every route that may be handed on."""
        ...

    @property
    def paths(self) -> Mapping[str, Mapping[str, Any]]:
        """What an OpenAPI document says of each path; slow the first time."""
        ...

    @property
    def sees_every_request(self) -> bool:
        """Whether it is to see every OpenAI request: it counts them, or code of the user's does."""
        ...

    def find(self, method: str, path: str) -> HttpRoute | None:
        """Return the route that a request means, also where only its method is wrong."""
        ...

    async def is_asleep(self) -> bool:
        """Whether a call has put the engine to sleep or paused it; False where it cannot tell."""
        ...

    async def call(self, call: HttpCall, direct: DirectEvents | None = None) -> OpenAIReply:
        """Return the answer; one that is not whole at once is a stream.

        With `direct`, what comes while it is open goes there instead of into the stream.

        Raises:
            EngineDeadError: the engine is gone.
            EngineFailureError: the application itself failed.
        """
        ...


class MediaRefusedError(Exception):
    """A URL inside a message is not fetched, or not to its end; the text is for the client."""


class FetchMedia(Protocol):
    """Fetches what a URL inside a message names."""

    async def __call__(
        self,
        url: str,
        policy: MediaPolicy,
        domains: Collection[str] = (),
        *,
        silence_seconds: float | None = None,
        max_bytes: int | None = None,
        follows_redirects: bool = True,
    ) -> bytes:
        """Return the bytes at `url`, of one of the `domains` where there are any.

        Raises:
            MediaRefusedError: it may not be fetched, is too large or late, or its server refuses.
        """
        ...


# Compiles a grammar: its matcher, and the lengths of the vocabulary's tokens in bytes. None where
# another library has it; an exception says what is wrong with it.
CompileGrammar = Callable[[], tuple[Any, Any] | None]


class GrammarTrials(Protocol):
    """Tries grammars in processes that can end, equal ones once."""

    async def verdict(
        self, grammar: str, compile_grammar: CompileGrammar, max_tokens: int | None, source: str
    ) -> str:
        """Return why `grammar` is refused for an answer of so many tokens; nothing where it is not.

        Trials of one `source` do not delay those of others, and end when no caller waits for them.
        """
        ...


class EngineProcess(Protocol):
    """The calls of health checks and watchdogs: liveness, progress, end."""

    @property
    def running_requests(self) -> int:
        """Requests the engine holds, running and waiting."""
        ...

    @property
    def progress(self) -> int:
        """Grows with every step the engine completes; stands still while it stalls."""
        ...

    async def check_health(self) -> None:
        """Return quickly when alive.

        Raises:
            EngineDeadError: the engine is gone.
        """
        ...

    async def log_statistics(self) -> None:
        """Log throughput and load since the last call; nothing while idle, or without figures."""
        ...

    async def wait_until_dead(self) -> None:
        """Return once the engine is gone without `close` having been called."""
        ...

    async def kill(self) -> bool:
        """End an engine that hangs, without asking it: it is dead, and what waits for it fails.

        Returns whether what hung has really ended; `close` still has to be called.
        """
        ...

    async def close(self) -> None:
        """End the engine and every process it started; may be called twice."""
        ...


class Engine(EngineProcess, Protocol):
    """Generates tokens, answers OpenAI calls and holds adapters."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        ...

    @property
    def not_finite(self) -> int:
        """Requests without an adapter that failed because their numbers were not finite (NaN)."""
        ...

    @property
    def active_adapters(self) -> ActiveAdapters:
        """Which adapters requests run on or wait for, those of its other clients included."""
        ...

    @property
    def task(self) -> str:
        """What the loaded model does: `generate`, or a pooling task such as `embed`."""
        ...

    @property
    def http(self) -> HttpApplication | None:
        """Its own HTTP application; None where it has none."""
        ...

    @property
    def openai_schemas(self) -> OpenAISchemas:
        """What its OpenAI handlers read and answer; slow the first time."""
        ...

    def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncIterator[GenerationChunk]:
        """Yield the chunks of `job`, each sequence ending with a finish reason.

        While `direct` is open it may be called with chunks instead; they and those that are yielded
        come in order, and the first and the last of the stream are always yielded.

        Closing the iterator, or cancelling its consumer, frees the request within a second.

        Raises:
            PayloadError: the job itself is at fault (prompt too long, bad sampling value).
            EngineDeadError: the engine is gone; also while iterating.
        """
        ...

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[PromptToken]:
        """Return the tokens of `text`, with the characters of it that each stands for."""
        ...

    async def answer_openai(
        self, call: OpenAICall, direct: DirectEvents | None = None
    ) -> OpenAIReply:
        """Answer with vLLM's own OpenAI bytes; errors of the request are replies, not exceptions.

        While `direct` is open it may be called with events of the stream instead, in order.

        Raises:
            EngineDeadError: the engine is gone.
        """
        ...

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Make `adapter` usable, under its name for OpenAI calls too.

        Raises:
            AdapterRefusedError: it cannot be loaded; nothing of it stays behind.
        """
        ...

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Forget `adapter` and its weights; unknown ones are ignored."""
        ...

    @property
    def tokenizer(self) -> object:
        """The model's tokenizer; None where there is none. Copy it to use it in another thread."""
        ...
