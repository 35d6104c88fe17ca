"""An engine is healthy only once it has answered for real, and as it will be asked."""

import io
import wave
from collections.abc import AsyncIterator

import pytest

from lmi_vllm.errors import StartupError
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import GenerationChunk, GenerationJob, HttpCall, OpenAIReply
from lmi_vllm.server.warm_up import warm_up
from tests.support.scripted_application import ScriptedApplication


class Counting(ScriptedEngine):
    """Keeps how many log probabilities each request asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[object] = []

    def generate(self, job: GenerationJob) -> AsyncIterator[GenerationChunk]:
        """Return the chunks."""
        self.asked.append(job.sampling["logprobs"])
        return super().generate(job)


async def test_log_probabilities_are_compiled_as_requests_ask_for_them() -> None:
    """Of the sampled token, for which `/invocations` asks, and of others where they are allowed."""
    engine = Counting()
    await warm_up(engine)
    assert engine.asked == [0], "with max_logprobs=0 vLLM would refuse more"
    await warm_up(engine, has_top_logprobs=True)
    assert engine.asked[1:] == [0, 1]


class Hearing(ScriptedApplication):
    """Answers a transcription with a status, and keeps what it was sent."""

    status = 200
    call_seen: HttpCall | None = None

    async def call(self, call: HttpCall, _: object = None) -> OpenAIReply:
        """Return an answer."""
        self.call_seen = call
        return OpenAIReply(self.status, b"soundfile is missing")


async def test_a_model_that_only_hears_is_proven_by_a_silence() -> None:
    """A sound file as any client uploads one; what refuses it ends the start by its own words."""
    engine = ScriptedEngine(task="transcription")
    engine.http = application = Hearing(engine)
    await warm_up(engine)
    assert application.call_seen is not None
    _, _, file = application.call_seen.body.partition(b"\r\n\r\n")
    with wave.open(io.BytesIO(file)) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (16000, 1600)
    application.status = 500
    with pytest.raises(StartupError, match="soundfile is missing"):
        await warm_up(engine)
