from typing import Any

import orjson
import pytest

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.features.scripted.engine import Pause, ScriptedEngine
from lmi_vllm.inference.context import Runtime
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import (
    GeneratedToken,
    GenerationChunk,
    InferenceCall,
    Reply,
    ServingProfile,
)

CHUNK = GenerationChunk(0, (GeneratedToken(5, " a", -0.5),), " a")


@pytest.fixture
def engine() -> ScriptedEngine:
    """Return an engine that makes one token and then waits."""
    return ScriptedEngine(script=(CHUNK, Pause(60)))


@pytest.fixture
def service(engine: ScriptedEngine) -> InferenceService:
    """Return a ready service without any HTTP around it."""
    profile = ServingProfile(model_name="demo")
    ready = InferenceService(RequestQueue(Lifecycle()), profile)
    ready.attach(Runtime(engine, profile, AdapterRegistry(engine, str, is_enabled=False)))
    ready.lifecycle.set_state(State.HEALTHY)
    return ready


async def infer(service: InferenceService, **payload: Any) -> Reply:
    """Return the reply to a payload."""
    return await service.infer(InferenceCall(orjson.dumps(payload), request_id="r"))


async def test_unstarted_stream_is_released_when_closed(
    service: InferenceService, engine: ScriptedEngine
) -> None:
    """Closed before its first byte, a reply has ended its engine request and left its place."""
    reply = await infer(service, inputs="x", stream=True)
    assert reply.stream is not None
    assert (engine.running_requests, service.queue.in_flight) == (1, 1)
    await reply.stream.aclose()  # type: ignore[attr-defined]
    assert (engine.running_requests, service.queue.in_flight) == (0, 0)


async def test_unstarted_openai_stream_is_released_when_closed(
    service: InferenceService, engine: ScriptedEngine
) -> None:
    """The same holds for vLLM's own streams, with and without their framing."""
    reply = await infer(service, prompt="x", stream=True)
    assert reply.stream is not None
    await reply.stream.aclose()  # type: ignore[attr-defined]
    assert (engine.running_requests, service.queue.in_flight) == (0, 0)


async def test_service_stream_closed_in_the_middle_is_over(
    service: InferenceService, engine: ScriptedEngine
) -> None:
    """Closed between two rows, nothing of the request is left."""
    reply = await infer(service, inputs="x", stream=True)
    assert reply.stream is not None
    await anext(reply.stream)
    await reply.stream.aclose()  # type: ignore[attr-defined]
    assert (engine.running_requests, service.queue.in_flight) == (0, 0)
