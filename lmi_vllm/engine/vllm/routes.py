"""The kind of each route of vLLM's own application, and the form of its errors.

Both are read from the loaded application: the subpackage of vLLM that has the endpoint, and the
error model that a route declares. This module imports no vLLM.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from fastapi.routing import APIRoute
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from lmi_vllm.errors import Dialect
from lmi_vllm.messages import HttpRoute, RouteKind

_PACKAGE: Final = "vllm.entrypoints."
# Subpackages of vLLM whose routes act on the server. An endpoint below `serve` is one of them
# unless it is known to be harmless.
_MANAGEMENT: Final = ("serve.", "rl.")
_INFORMATION: Final = ("serve.instrumentator.", "openai.models.")
_HARMLESS: Final = ("serve.tokenize.",)
# Routes that load adapters without our registry: vLLM's own, and those that SageMaker's library
# adds.
_REFUSED: Final = ("serve.lora.", "model_hosting_container_standards.")
# There only with handlers or middleware of the user's for SageMaker's library.
SAGEMAKER: Final[Mapping[str, RouteKind]] = MappingProxyType(
    {"/ping": RouteKind.INFORMATION, "/invocations": RouteKind.INFERENCE}
)
# By the model that a route declares for its errors.
_DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {"AnthropicErrorResponse": Dialect.ANTHROPIC, "CohereError": Dialect.COHERE}
)
# It ends a request of the same client, and takes no queue slot.
_ENDING: Final = "/cancel"
# These split prompts into tokens, as those that end with /render: the engine may sleep.
_SPLITS: Final = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
# It ends requests of others.
_ABORTING: Final = "/abort_requests"


class ExactRoutes:
    """A router that looks up a path without parameters, instead of trying each route.

    As in Starlette the first matching route counts.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._routes = {
            (method, route.path): route
            for route in reversed(router.routes)
            if isinstance(route, APIRoute) and "{" not in route.path
            for method in route.methods
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        route = self._routes.get((scope.get("method", ""), scope.get("path", "")))
        if route is None or scope.get("root_path"):
            await self._router.app(scope, receive, send)
            return
        _, match = route.matches(scope)
        scope.update(match, router=self._router, route=route)
        await route.handle(scope, receive, send)


def is_refused(route: APIRoute) -> bool:
    """Whether it would change state that this server keeps itself."""
    return route.path not in SAGEMAKER and _room(route).startswith(_REFUSED)


def described(route: APIRoute) -> HttpRoute:
    """Return the route with its kind and dialect."""
    splits = route.path in _SPLITS or route.path.endswith("/render")
    methods, kind = frozenset(route.methods), _kind(route)
    return HttpRoute(route.path, methods, kind, _dialect(route), needs_engine=not splits)


def _kind(route: APIRoute) -> RouteKind:
    """Return the effect of a route, from the subpackage of vLLM with its endpoint."""
    room = _room(route)
    if (known := SAGEMAKER.get(route.path)) is not None:
        return known
    if room.startswith(_INFORMATION) or route.path.endswith(_ENDING):
        return RouteKind.INFORMATION
    if room.startswith(_HARMLESS):
        return RouteKind.INFERENCE
    if room.startswith(_MANAGEMENT) or route.path.endswith(_ABORTING):
        return RouteKind.MANAGEMENT
    return RouteKind.INFORMATION if route.methods == {"GET"} else RouteKind.INFERENCE


def _room(route: APIRoute) -> str:
    """Return the module of a route's endpoint, below vLLM's package of endpoints."""
    return str(getattr(route.endpoint, "__module__", "")).removeprefix(_PACKAGE)


def _dialect(route: APIRoute) -> Dialect:
    """Return the dialect of a route's errors, from the model that it declares for them."""
    models: Iterable[Any] = (answer.get("model") for answer in route.responses.values())
    names: Sequence[str] = [getattr(model, "__name__", "") for model in models]
    return next((_DIALECTS[name] for name in names if name in _DIALECTS), Dialect.OPENAI)
