"""The double of vLLM's HTTP application: routes of the scripted engine, answered by its calls."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import Dialect, EngineDeadError
from lmi_vllm.messages import HttpCall, HttpRoute, OpenAICall, OpenAIReply, RouteKind
from lmi_vllm.telemetry.records import current_record

POST: Final = frozenset({"POST"})
KINDS: Final = ("embeddings", "tokenize", "detokenize", "rerank", "score", "classify", "pooling")


def route(
    path: str, kind: RouteKind = RouteKind.INFERENCE, methods: frozenset[str] = POST
) -> HttpRoute:
    """Return a route as vLLM has it."""
    return HttpRoute(path, methods, kind, Dialect.OPENAI)


ROUTES: Final = (
    route("/v1/responses"),
    route("/v1/embeddings"),
    *(route(f"/{kind}") for kind in KINDS[1:]),
    route("/v1/rerank"),
    route("/v2/rerank"),
    route("/v1/score"),
    route("/v1/responses/{response_id}", RouteKind.INFORMATION, frozenset({"GET"})),
    route("/v1/responses/{response_id}/cancel", RouteKind.INFORMATION),
)


def _described(path: str) -> dict[str, Any]:
    """Return as much as vLLM says of a route."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    content = {"application/json": {"schema": {"type": "object"}}}
    answers = {"200": {"description": "The answer.", "content": content}}
    return {"summary": "A route", "parameters": parameters, "responses": answers}


DESCRIPTION: Final[Mapping[str, Any]] = {
    "paths": {
        each.path: {method.lower(): _described(each.path) for method in each.methods}
        for each in ROUTES
    }
}


def by_name(call: HttpCall) -> dict[str, str]:
    """Return the headers of a call by lower-case name."""
    return {name.decode().lower(): value.decode() for name, value in call.headers}


@dataclass
class ScriptedApplication:
    """Answers as the engine answers the call of that kind: with the body that was sent."""

    engine: Engine
    routes: tuple[HttpRoute, ...] = ROUTES
    sees_every_request: bool = False

    def change(self, change: Callable[[Any], object]) -> None:
        """There is nothing to change."""

    def find(self, method: str, path: str) -> HttpRoute | None:
        """Return the route of that path."""
        del method
        for each in self.routes:
            if re.fullmatch(re.sub(r"{\w+}", "[^/]+", each.path), path):
                return each
        return None

    def refusal(self, call: HttpCall) -> OpenAIReply | None:
        """Return what answers a method that the route does not have."""
        route = self.find(call.method, call.path)
        if route is None or call.method in route.methods:
            return None
        return OpenAIReply(405, b"{}", headers={"allow": ", ".join(route.methods)})

    async def is_asleep(self) -> bool:
        """It never sleeps."""
        return False

    async def call(self, call: HttpCall, _: object = None) -> OpenAIReply:
        """Return what the engine answers; 405 for a method that the route does not have."""
        if (refused := self.refusal(call)) is not None:
            return refused
        kind = re.sub(r"^(/v\d)?/", "", call.path)
        try:
            body = orjson.loads(call.body or b"{}")
        except orjson.JSONDecodeError:
            return OpenAIReply(400, b'{"error":{"code":400}}')
        return await self.engine.answer_openai(
            OpenAICall(kind, body, by_name(call), call.request_id, call.adapter)
        )


@dataclass
class EchoingApplication(ScriptedApplication):
    """Keeps its calls, and answers with the body that was sent, or a stream if it asks for one."""

    calls: list[HttpCall] = field(default_factory=list)
    dies_after: int | None = None  # so many chunks of a stream
    content_type: str = "text/event-stream"
    chunks: int = 3
    gate: asyncio.Event | None = None  # what a stream waits for after its first chunk
    closed: int = 0

    async def is_asleep(self) -> bool:
        """Whether the last call was one for /sleep."""
        return bool(self.calls) and self.calls[-1].path == "/sleep"

    async def call(self, call: HttpCall, _: object = None) -> OpenAIReply:
        """Return the body that was sent, or a stream."""
        self.calls.append(call)
        if (refused := self.refusal(call)) is not None:
            return refused
        headers = CIMultiDict([("x-of-vllm", "1"), ("set-cookie", "a=1"), ("set-cookie", "b=2")])
        record = current_record()
        if b'"background"' in call.body and record is not None and record.keep is not None:
            record.keep(asyncio.create_task(self._drained()))
        if b'"stream"' in call.body:
            return OpenAIReply(
                200, content_type=self.content_type, stream=self._chunks(), headers=headers
            )
        return OpenAIReply(200, call.body, "application/json", headers=headers)

    async def _drained(self) -> None:
        async for _ in self._chunks():
            pass

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            for count in range(self.chunks):
                if count == self.dies_after:
                    raise EngineDeadError
                if count and self.gate is not None:
                    await self.gate.wait()
                yield b"data: %d\n\n" % count
        finally:
            self.closed += 1
