"""The warm-up: an engine is healthy only once it has answered a real request."""

import asyncio
import contextlib
import struct
import uuid
from typing import Final

from lmi_vllm.engine.base import Engine, start_error
from lmi_vllm.errors import EngineDeadError, EngineFailureError, LmiError
from lmi_vllm.messages import GENERATE, POOLING_KINDS, GenerationJob, HttpCall, OpenAICall

TRANSCRIBE: Final = "transcription"  # of models that only transcribe
DEATH_SECONDS: Final = 5.0  # until an engine that has died has told how
WARM_UP_PROMPT: Final = "Hello"
WARM_UP_TOKEN: Final = 1  # for an engine without a tokenizer: each model knows it


async def warm_up(engine: Engine, *, has_top_logprobs: bool = False) -> None:
    """Check that the engine generates a token or a pooled answer.

    With `has_top_logprobs` it generates another one, with the log probability of the likeliest.

    Raises:
        StartupError: the engine refused, or generated nothing.
    """
    try:
        if engine.task == GENERATE:
            is_proven = await _generates(engine, 0)
            if has_top_logprobs:
                is_proven &= await _generates(engine, 1)
        else:
            is_proven = await (_transcribes if engine.task == TRANSCRIBE else _pools)(engine)
    except LmiError as error:
        reason = await how_it_died(engine) if isinstance(error, EngineDeadError) else ""
        raise start_error(
            f"the engine started but cannot answer: {reason or error.text}"
        ) from error
    if not is_proven:
        raise EngineFailureError("the engine started but generated no token")


async def how_it_died(engine: Engine) -> str:
    """Return how a dead engine has died; empty if it lives, or that is not known in time."""
    try:
        await engine.check_health()
    except EngineDeadError:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(engine.wait_until_dead(), DEATH_SECONDS)
    return ""


async def _generates(engine: Engine, logprobs: int) -> bool:
    # On a GPU the first use of log probabilities compiles a kernel, another one for the sampled
    # token alone (0), which `/invocations` asks for, than beside the likeliest.
    sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": logprobs}
    ids = (WARM_UP_TOKEN,) if engine.tokenizer is None else ()
    job = GenerationJob(f"warm-up-{uuid.uuid4()}", WARM_UP_PROMPT, sampling, prompt_ids=ids)
    chunks = [chunk async for chunk in engine.generate(job)]
    return any(chunk.tokens for chunk in chunks)


async def _pools(engine: Engine) -> bool:
    kind = POOLING_KINDS.get(engine.task, "pooling")
    call = OpenAICall(kind, {"input": WARM_UP_PROMPT}, {}, "warm-up")
    answer = await engine.answer_openai(call)
    if answer.status != 200:  # noqa: PLR2004 (success)
        raise EngineFailureError(answer.body.decode("utf-8", "replace"))
    return True


async def _transcribes(engine: Engine) -> bool:
    """Transcribe a silence, the only kind of request of such a model."""
    if engine.http is None:
        return False
    headers = [(b"content-type", b"multipart/form-data; boundary=warm-up")]
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
