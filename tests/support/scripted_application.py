"""The double of vLLM's HTTP application: routes of the scripted engine, answered by its calls."""

import re
from dataclasses import dataclass
from typing import Any, Final

import orjson

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import Dialect
from lmi_vllm.messages import HttpCall, HttpRoute, OpenAICall, OpenAIReply, RouteKind

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


def by_name(call: HttpCall) -> dict[str, str]:
    """Return the headers of a call by lower-case name."""
    return {name.decode().lower(): value.decode() for name, value in call.headers}


@dataclass
class ScriptedApplication:
    """Answers as the engine answers the call of that kind: with the body that was sent."""

    engine: Engine
    routes: tuple[HttpRoute, ...] = ROUTES
    sees_every_request: bool = False

    @property
    def paths(self) -> dict[str, dict[str, Any]]:
        """Say as much as vLLM says of a route that nothing here describes."""
        answers = {"200": {"description": "The answer."}}
        return {each.path: {"post": {"responses": answers}} for each in self.routes}

    def find(self, method: str, path: str) -> HttpRoute | None:
        """Return the route of that path."""
        del method
        for each in self.routes:
            if re.fullmatch(re.sub(r"{\w+}", "[^/]+", each.path), path):
                return each
        return None

    async def is_asleep(self) -> bool:
        """It never sleeps."""
        return False

    async def call(self, call: HttpCall, _: object = None) -> OpenAIReply:
        """Return what the engine answers; 405 for a method that the route does not have."""
        route = self.find(call.method, call.path)
        if route is not None and call.method not in route.methods:
            return OpenAIReply(405, b"{}", headers={"allow": ", ".join(route.methods)})
        kind = re.sub(r"^(/v\d)?/", "", call.path)
        try:
            body = orjson.loads(call.body or b"{}")
        except orjson.JSONDecodeError:
            return OpenAIReply(400, b'{"error":{"code":400}}')
        return await self.engine.answer_openai(
            OpenAICall(kind, body, by_name(call), call.request_id, call.adapter)
        )
