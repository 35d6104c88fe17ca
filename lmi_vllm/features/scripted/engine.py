"""An engine that follows a script of chunks, delays and failures; for tests of what surrounds one.

Without a script it answers every prompt by repeating its words, one token each. It also serves
`serve --engine scripted`, where start-up, drain and overload are tried without vLLM.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from lmi_vllm.engine.base import (
    ActiveAdapters,
    DirectChunks,
    DirectEvents,
    Engine,
    EngineClient,
    HttpApplication,
)
from lmi_vllm.engine.deaths import ENGINE_DIED
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.errors import (
    AdapterRefusedError,
    EngineDeadError,
    EngineFailureError,
    LmiError,
    PayloadError,
)
from lmi_vllm.messages import (
    AdapterRef,
    EngineArguments,
    GeneratedToken,
    GenerationChunk,
    GenerationJob,
    OpenAICall,
    OpenAIReply,
    PromptToken,
    ServingProfile,
)
from lmi_vllm.telemetry.records import SequenceFigures, current_record

SCRIPTED_SECONDS: Final = "LMI_SCRIPTED_SECONDS_PER_TOKEN"
SCRIPTED_LENGTH: Final = "LMI_SCRIPTED_MAX_MODEL_LEN"
LENGTH: Final = 2048


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait `seconds` before the next step."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise `error` at this step."""

    error: LmiError


Step = GenerationChunk | Pause | Fail | asyncio.Event  # the last: wait until it is set


@dataclass(slots=True)
class _ScriptedSequence:
    """What the engine counts for one job; it has no queue."""

    prompt_tokens: int
    times: list[float] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        self.times += [time.time()] * tokens

    def figures(self) -> SequenceFigures:
        count, spent = len(self.times), max(self.times, default=0) - min(self.times, default=0)
        return SequenceFigures(
            self.prompt_tokens,
            count,
            0.0,
            self.times[0] if count else None,
            spent / (count - 1) if count > 1 else None,
        )


@dataclass(slots=True)
class ScriptedEngine:
    """Follows `script` for every job; `seconds_per_token` slows the default answer down."""

    script: Sequence[Step] = ()
    seconds_per_token: float = 0.0
    max_model_len: int = LENGTH
    task: str = "generate"
    tokenizer: object = None
    http: HttpApplication | None = None
    openapi: Mapping[str, Any] = field(default_factory=dict)
    openai_error: Mapping[str, object] = field(default_factory=dict)  # ends streams as vLLM's
    refused_adapters: Mapping[str, str] = field(default_factory=dict)  # name -> reason
    adapters: dict[str, AdapterRef] = field(default_factory=dict)
    jobs: list[GenerationJob] = field(default_factory=list)
    calls: list[OpenAICall] = field(default_factory=list)
    running_requests: int = 0
    progress: int = 0
    not_finite: int = 0
    active_adapters: ActiveAdapters = field(default_factory=ActiveAdapters)
    logged_statistics: int = 0
    sleeps: list[int] = field(default_factory=list)  # levels, in order
    is_asleep: bool = False
    is_closed: bool = False
    can_be_killed: bool = True
    _dead: asyncio.Event = field(default_factory=asyncio.Event)

    async def read_adapters(self) -> None:
        """Do nothing: there are no workers."""

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the script's chunks, or the default answer; see `Engine.generate`."""
        await self._check_awake()
        if len(job.prompt.split()) >= self.max_model_len:
            raise PayloadError(f"the prompt is longer than max_model_len {self.max_model_len}")
        self.jobs.append(job)
        self.running_requests += 1
        sequence = _ScriptedSequence(len(job.prompt.split()))
        if (record := current_record()) is not None:
            record.sequences.append(sequence)
        try:
            steps = self.script or self._default_answer(job)
            if not job.is_streaming and not self.script:
                steps = _merged(steps)
            for step in steps:
                if isinstance(step, Fail):
                    raise step.error
                if isinstance(step, (Pause, asyncio.Event)):
                    await self._wait(step)
                else:
                    self.progress += 1
                    sequence.add(len(step.tokens))
                    if direct is None or step.finish_reason is not None or not direct.is_open:
                        yield step
                    else:
                        direct.read_chunk(step)
        finally:
            self.running_requests -= 1

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[PromptToken]:
        """Return a token for each word with the blanks before it, after a first empty one."""
        await self.check_health()
        words = [match.span() for match in re.finditer(r"\s*\S+", text)]
        spans = [(0, 0), *words] if add_special_tokens else words
        return [PromptToken(position, *span) for position, span in enumerate(spans)]

    async def answer_openai(
        self, call: OpenAICall, direct: DirectEvents | None = None
    ) -> OpenAIReply:
        """Answer in the shape of vLLM's replies, without its content."""
        await self.check_health()
        self.calls.append(call)
        body: dict[str, object] = {"object": call.kind, "model": call.body.get("model", "lmi")}
        if call.kind == "embeddings":
            body["data"] = _vectors(call.body.get("input"))
        if call.body.get("stream"):
            return OpenAIReply(
                200, content_type="text/event-stream", stream=self._events(body, direct)
            )
        return OpenAIReply(200, json.dumps(body, separators=(",", ":")).encode())

    def uncounted(self) -> AbstractContextManager[None]:
        """There are no metrics of its own."""
        return nullcontext()

    async def _check_awake(self) -> None:
        await self.check_health()
        if self.is_asleep:  # vLLM's would keep the request until it is woken
            raise EngineFailureError("the engine is asleep")

    async def sleep(self, level: int) -> None:
        """Answer no request until `wake_up`."""
        await self.check_health()
        self.sleeps.append(level)
        self.is_asleep = True

    async def wake_up(self, level: int) -> None:
        """Answer again; level 2 has lost the adapters."""
        await self.check_health()
        self.is_asleep = False

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Keep the adapter, or refuse it as scripted."""
        await self.check_health()
        if reason := self.refused_adapters.get(adapter.name):
            raise AdapterRefusedError(reason)
        self.adapters[adapter.name] = adapter

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Forget the adapter unless a newer one has its name."""
        known = self.adapters.get(adapter.name)
        if known is not None and known.engine_id == adapter.engine_id:
            del self.adapters[adapter.name]

    async def check_health(self) -> None:
        """Raise EngineDeadError after `die`."""
        if self._dead.is_set():
            raise EngineDeadError

    async def log_statistics(self) -> None:
        """Count the call; it has no figures."""
        self.logged_statistics += 1

    async def wait_until_dead(self) -> str:
        """Return after `die`."""
        await self._dead.wait()
        return ENGINE_DIED

    async def kill(self) -> bool:
        """Behave as `die` does; see `Engine.kill`."""
        self.die()
        return self.can_be_killed

    async def close(self) -> None:
        """Remember having been closed."""
        self.is_closed = True

    def die(self) -> None:
        """Behave as an engine whose process is gone: what waits, and what comes, fails."""
        self._dead.set()

    async def _wait(self, step: Pause | asyncio.Event) -> None:
        await (step.wait() if isinstance(step, asyncio.Event) else self._sleep(step.seconds))

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._dead.wait(), seconds)
        except TimeoutError:
            return
        raise EngineDeadError

    def _default_answer(self, job: GenerationJob) -> list[Step]:
        words = job.prompt.split() or [job.prompt]
        wanted = job.number("max_tokens", 0) or 16
        wants_logprobs = job.sampling.get("logprobs") is not None
        steps: list[Step] = []
        for position in range(wanted):
            if self.seconds_per_token:
                steps.append(Pause(self.seconds_per_token))
            text = " " + words[position % len(words)]
            token = GeneratedToken(position, text, -0.5 if wants_logprobs else None)
            is_last = position == wanted - 1
            steps.append(
                GenerationChunk(
                    0, (token,), text, "length" if is_last else None, prompt_tokens=len(words)
                )
            )
        return steps

    async def _events(
        self, body: Mapping[str, object], direct: DirectEvents | None
    ) -> AsyncIterator[bytes]:
        self.running_requests += 1
        try:
            for position in range(3):
                await self._sleep(self.seconds_per_token)
                if position and self.openai_error:
                    yield b"data: " + json.dumps(self.openai_error).encode() + b"\n\n"
                    break
                event = b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
                if position and direct is not None and direct.is_open:
                    direct.read_event(event)
                else:
                    yield event
            yield b"data: [DONE]\n\n"
        finally:
            self.running_requests -= 1


def _vectors(inputs: object) -> list[dict[str, object]]:
    """Return a vector for each text: its length and number of words."""
    texts = inputs if isinstance(inputs, list) else [inputs]
    return [
        {"index": index, "embedding": [float(len(str(text))), float(len(str(text).split()))]}
        for index, text in enumerate(texts)
    ]


def _merged(steps: Sequence[Step]) -> list[Step]:
    """Return the pauses, then all chunks as one: what an engine that does not stream yields."""
    chunks = [step for step in steps if isinstance(step, GenerationChunk)]
    whole = GenerationChunk(
        index=0,
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        text="".join(chunk.text for chunk in chunks),
        finish_reason=chunks[-1].finish_reason,
        prompt_tokens=chunks[-1].prompt_tokens,
    )
    return [*(step for step in steps if isinstance(step, Pause)), whole]


class ScriptedFactory:
    """Makes scripted engines, with `make`; they read no model and import nothing."""

    reads_model = False

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make

    def kind(self, arguments: EngineArguments) -> str:
        """Return their name, whatever the model."""
        return "scripted"

    async def load(self, arguments: EngineArguments) -> None:
        """Need nothing; see `EngineFactory.load`."""

    async def start(
        self,
        arguments: EngineArguments,
        profile: ServingProfile,
        clients: tuple[EngineClient, ...] = (),
    ) -> Engine:
        """Return the next engine; see `EngineFactory.start`."""
        return self._make()

    def abandon(self) -> None:
        """Leave nothing, since there are no processes; see `EngineFactory.abandon`."""


def scripted_engines(environ: Mapping[str, str]) -> EngineFactory:
    """Return what makes engines that repeat the prompt, at the pace of the environment."""
    seconds = float(environ.get(SCRIPTED_SECONDS, "0"))
    length = int(environ.get(SCRIPTED_LENGTH, str(LENGTH)))
    return ScriptedFactory(lambda: ScriptedEngine(seconds_per_token=seconds, max_model_len=length))
