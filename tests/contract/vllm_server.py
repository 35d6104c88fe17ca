"""vLLM's own HTTP application over a running engine of ours, to compare bytes with."""

import itertools
import logging
import re
from dataclasses import dataclass
from typing import Any, Self

import httpx
from fastapi import FastAPI
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.api_server.routers import register_api_routers
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from lmi_vllm.engine.vllm.engine import VllmEngine
from lmi_vllm.messages import OpenAICall
from tests.support.vllm_namespace import namespace_of

# What two answers to one request may differ in: times of day.
_TIMES = re.compile(rb'("(?:created|created_at|completed_at)": ?)[0-9.]+')
# The Responses API draws an id for each answer and message.
_DRAWN_IDS = re.compile(rb'"(msg|resp|rs)_[0-9a-z-]+"')
_BARE_IDS = re.compile(rb'"((?:item_)?id)":"[0-9a-f]{16}"')  # vLLM 0.31's, of streamed items
# The text that an event of a stream adds, and the number of an event of the Responses API.
_ADDED = re.compile(
    rb'("delta":\{"content":|"delta":|"choices":\[\{"index":[0-9]+,"text":)"((?:[^"\\]|\\.)*)"'
)
_NUMBER = re.compile(rb'"sequence_number":([0-9]+)')
STREAM_ATTEMPTS = 5
REQUEST_ID = "compared"


@dataclass(frozen=True)
class VllmServer:
    """vLLM's FastAPI application, called without a socket."""

    client: httpx.AsyncClient

    @classmethod
    async def over(cls, engine: VllmEngine, **arguments: object) -> Self:
        """Return the application that `vllm serve` would run over this engine."""
        llm = engine._llm
        values = {"model": llm.model_config.model, "served_model_name": ["lmi"], **arguments}
        namespace = namespace_of(values)
        tasks = await llm.get_supported_tasks()
        app = FastAPI()
        app.state.args = namespace
        level = logging.root.level
        register_api_routers(namespace, app, tasks, llm.model_config)
        logging.root.setLevel(level)  # its SageMaker part has raised it for the whole process
        init_exception_handler(app)
        await init_app_state(llm, app.state, namespace, tasks)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return cls(httpx.AsyncClient(transport=transport, base_url="http://vllm"))

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
        """Return status, content type and body of vLLM's answer."""
        headers = {"X-Request-Id": REQUEST_ID}
        answer = await self.client.post(path, json=body, headers=headers, timeout=120)
        return (
            answer.status_code,
            _kind(answer.headers["content-type"]),
            _comparable(answer.content),
        )


async def same_bytes(
    engine: VllmEngine, server: VllmServer, kind: str, path: str, body: dict[str, Any]
) -> tuple[tuple[int, str, bytes], tuple[int, str, bytes]]:
    """Return our answer and vLLM's to one request, times of day and drawn ids taken out.

    How many tokens an event of a stream adds is not compared: on a busy machine vLLM joins those
    that have not been fetched yet. Where it joins all of them, the stream is asked for again.
    """
    for _ in range(STREAM_ATTEMPTS):
        ours, theirs = await _ours(engine, kind, body), await server.post(path, body)
        if body.get("stream"):
            ours, theirs = _joined(ours), _joined(theirs)
        if ours == theirs or not body.get("stream"):
            break
    return ours, theirs


def _joined(answer: tuple[int, str, bytes]) -> tuple[int, str, bytes]:
    """Return the answer with events that only add text as one, and the whole text at the end."""
    status, kind, content = answer
    numbers = [int(number) for number in _NUMBER.findall(content)]
    assert numbers == list(range(len(numbers))), "events are numbered in order"
    text = b"".join(match[2] for match in _ADDED.finditer(content))
    bare = _NUMBER.sub(b"", _ADDED.sub(rb'\1"+"', content))
    events = [event for event, _ in itertools.groupby(bare.split(b"\n\n"))]
    return status, kind, b"\n\n".join([*events, text])


async def _ours(engine: VllmEngine, kind: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
    reply = await engine.answer_openai(OpenAICall(kind, body, {}, REQUEST_ID))
    content = reply.body
    if reply.stream is not None:
        content = b"".join([event async for event in reply.stream])
    return reply.status, _kind(reply.content_type), _comparable(content)


def _comparable(content: bytes) -> bytes:
    content = _BARE_IDS.sub(rb'"\1":"drawn"', _TIMES.sub(rb"\1T", content))
    return _DRAWN_IDS.sub(rb'"\1"', content)


def _kind(content_type: str) -> str:
    return content_type.split(";", maxsplit=1)[0]
