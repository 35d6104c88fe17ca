"""Liveness of an engine: a warm-up answer at its start, and watchdogs for stalls and NaN."""

import asyncio
import logging
import struct
import uuid
from typing import Final

from lmi_vllm.clock import Clock
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import EngineFailureError, LmiError, StartupError
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.pooling import GENERATE, pooling_kind
from lmi_vllm.messages import GenerationJob, HttpCall, OpenAICall

logger = logging.getLogger(__name__)

TRANSCRIBE: Final = "transcription"  # of models that hear and do nothing else
WARM_UP_PROMPT: Final = "Hello"
ANSWER_CHECK_SECONDS: Final = 1.0
CHECKS: Final = 4  # looks at the engine within one stall time


class StallWatchdog:
    """Turns health bad while the engine holds requests and completes no step for `seconds`.

    A stalled engine may come back (a device that hung for a while): health follows its next step.
    By then its requests may have timed out, and new ones are refused: so it is given a token of
    our own to come back with. One that does not within `fatal_seconds` hangs: `hung` is set (0 is
    never), and it is to be replaced.
    """

    def __init__(
        self,
        engine: Engine,
        lifecycle: Lifecycle,
        seconds: float,
        clock: Clock,
        fatal_seconds: float = 0.0,
    ) -> None:
        self.hung = asyncio.Event()
        self._engine = engine
        self._lifecycle = lifecycle
        self._seconds = seconds
        self._fatal_seconds = fatal_seconds
        self._clock = clock
        self._progress = engine.progress
        self._since = clock.now()
        self._probe: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Watch until cancelled; 0 seconds is no watch at all."""
        if not self._seconds:
            return
        try:
            while True:
                await self._clock.sleep(self._seconds / CHECKS)
                self._look()
        finally:
            if self._probe is not None:
                self._probe.cancel()

    def _look(self) -> None:
        now = self._clock.now()
        is_stalled = self._lifecycle.state is State.UNHEALTHY
        if self._engine.progress != self._progress:
            self._progress, self._since = self._engine.progress, now
            if is_stalled:
                logger.warning("the engine makes progress again")
                self._lifecycle.set_state(State.HEALTHY)
        elif is_stalled:
            if self._fatal_seconds and now - self._since >= self._fatal_seconds:
                self.hung.set()
            elif self._probe is None or (self._probe.done() and not self._engine.running_requests):
                self._probe = asyncio.create_task(_ask(self._engine))
        elif not self._engine.running_requests or self._lifecycle.state is State.ASLEEP:
            self._since = now  # also while it sleeps with requests that it keeps
        elif now - self._since >= self._seconds and self._lifecycle.state is State.HEALTHY:
            logger.error(
                "the engine holds %d requests and has completed no step for %.0f s "
                "(LMI_STALL_TIMEOUT)",
                self._engine.running_requests,
                now - self._since,
            )
            self._lifecycle.set_state(State.UNHEALTHY)


class AnswerWatchdog:
    """Repeats the warm-up after a request to the base model gave numbers that are not finite (NaN).

    A single prompt may overflow half precision. If the warm-up fails in the same way, the engine
    itself is corrupted: `corrupted` is set, and the supervisor replaces the engine.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.corrupted = asyncio.Event()
        self._engine = engine
        self._clock = clock

    async def run(self) -> None:
        """Watch until cancelled, or until `corrupted` is set."""
        known = 0
        while not self.corrupted.is_set():
            await self._clock.sleep(ANSWER_CHECK_SECONDS)
            if self._engine.not_finite != known:
                known = self._engine.not_finite
                await self._look(known)

    async def _look(self, known: int) -> None:
        logger.error("the model's own numbers were not finite for a request: it is asked again")
        try:
            await warm_up(self._engine)
        except LmiError as error:
            logger.error("%s", error.text)
            if self._engine.not_finite != known:  # else it failed for another reason
                self.corrupted.set()


async def _ask(engine: Engine) -> None:
    try:
        await warm_up(engine)
    except LmiError as error:
        logger.warning("the stalled engine gave no token: %s", error)


async def warm_up(engine: Engine, *, has_logprobs: bool = True) -> None:
    """Prove the engine: health is claimed only after a token, or a pooled answer, came out.

    Raises:
        StartupError: the engine refused, or generated nothing.
    """
    try:
        if engine.task == GENERATE:
            is_proven = await _generates(engine, has_logprobs=has_logprobs)
        else:
            is_proven = await (_transcribes if engine.task == TRANSCRIBE else _pools)(engine)
    except LmiError as error:
        raise StartupError(f"the engine started but cannot answer: {error.text}") from error
    if not is_proven:
        raise EngineFailureError("the engine started but generated no token")


async def _generates(engine: Engine, *, has_logprobs: bool) -> bool:
    # With log probabilities: vLLM compiles a part of them at their first use, on a GPU too.
    sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1 if has_logprobs else None}
    job = GenerationJob(f"warm-up-{uuid.uuid4()}", WARM_UP_PROMPT, sampling)
    chunks = [chunk async for chunk in engine.generate(job)]
    return any(chunk.tokens for chunk in chunks)


async def _pools(engine: Engine) -> bool:
    body = {"input": WARM_UP_PROMPT}
    answer = await engine.answer_openai(OpenAICall(pooling_kind(engine.task), body, {}, "warm-up"))
    if answer.status != 200:  # noqa: PLR2004 (success)
        raise EngineFailureError(answer.body.decode("utf-8", "replace"))
    return True


async def _transcribes(engine: Engine) -> bool:
    """Transcribe a silence by its route, which is the only way to such a model."""
    if engine.http is None:
        return False
    headers = {"Content-Type": "multipart/form-data; boundary=warm-up"}
    file = b'Content-Disposition: form-data; name="file"; filename="silence.wav"\r\n\r\n'
    body = b"--warm-up\r\n" + file + _silence() + b"\r\n--warm-up--\r\n"
    path = "/v1/audio/transcriptions"
    answer = await engine.http.call(HttpCall("POST", path, "", headers, body, "warm-up"))
    if answer.status != 200:  # noqa: PLR2004 (success)
        raise EngineFailureError(answer.body.decode("utf-8", "replace"))
    return True


def _silence() -> bytes:
    """Return 0.1 s of silence as WAV: 16 kHz, 16 bits, one channel."""
    samples = bytes(2 * 1600)
    form = struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    head = struct.pack("<4sI4s4s", b"RIFF", 36 + len(samples), b"WAVE", b"fmt ")
    return head + form + struct.pack("<4sI", b"data", len(samples)) + samples
