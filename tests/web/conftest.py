"""What the web tests share: waiting for a condition, and an engine that stops between tokens."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.messages import GeneratedToken, GenerationChunk, GenerationJob, ServingProfile
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted

A = GenerationChunk(0, (GeneratedToken(5, " a", -0.5),), " a")
B = GenerationChunk(0, (GeneratedToken(9, " b", -0.5),), " b", "length")
ROW_A = b'{"index":0,"token":{"id":5,"text":" a","log_prob":-0.5,"logprob":-0.5}}\n'
STREAM = {"inputs": "x", "stream": True}
LORA = ServingProfile(model_name="demo", enable_lora=True)


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Return as soon as the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)


async def send_raw(client: TestClient, headers: bytes, body: bytes = b'{"inputs":"x"}') -> bytes:
    """POST /invocations with headers that no client library would send; returns the answer."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    length = b"Content-Length: %d\r\nConnection: close\r\n" % len(body)
    writer.write(b"POST /invocations HTTP/1.1\r\nHost: x\r\n" + length + headers)
    writer.write(b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def lifecycle_of(client: TestClient) -> Lifecycle:
    """Return the lifecycle behind a client."""
    return client.app[SERVICE].lifecycle


def queue_of(client: TestClient) -> RequestQueue:
    """Return the queue behind a client."""
    return client.app[SERVICE].queue


@pytest.fixture
async def lora(serve: ServeScripted) -> TestClient:
    """A client of a server with LoRA and no adapter."""
    return await serve(LORA)


async def call(client: TestClient, method: str, path: str, **options: Any) -> tuple[int, Any]:
    """Return the status and the decoded body of one call."""
    async with client.request(method, path, **options) as response:
        text = await response.text()
        if response.content_type != "application/json":
            return response.status, text
        assert text.endswith("\n") or path.startswith("/v1")
        return response.status, await response.json()


async def register(client: TestClient, *names: str) -> None:
    """Register adapters, each at a source named for it."""
    for name in names:
        await client.app[SERVICE].runtime.adapters.register(Adapter(name, f"/a/{name}"))


@dataclass
class GatedEngine(ScriptedEngine):
    """Yields its first chunk, then waits for the gate before every other step."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the script's chunks; after the first, once the gate is open."""
        async with contextlib.aclosing(super().generate(job)) as chunks:
            async for chunk in chunks:
                yield chunk
                await self.gate.wait()
