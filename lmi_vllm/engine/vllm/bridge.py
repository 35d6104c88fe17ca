"""vLLM's own HTTP application over our engine, called in process as an ASGI application.

It is built as in `vllm serve`, with the same arguments, so its answers are vLLM's bytes. Its paths,
the kind of each route and the form of its errors are read from the loaded application. A route of a
new release therefore needs no change here. This server does what `vllm serve` does around the
application: keys, CORS, limits, the drain. So vLLM's own middleware for keys, CORS and counts is
left out; middleware of `--middleware` stays.
"""

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import traceback
from argparse import Namespace
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final, Self

from fastapi import FastAPI, Request
from fastapi.dependencies.utils import solve_dependencies
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.routing import Match
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.utils.import_utils import import_plugin

from lmi_vllm.engine.base import DirectEvents
from lmi_vllm.engine.vllm.asgi import Exchange
from lmi_vllm.engine.vllm.async_llm import GuardedAsyncLLM
from lmi_vllm.engine.vllm.names import VllmEngineDeadError, create_error_response, to_lora_request
from lmi_vllm.engine.vllm.routes import SAGEMAKER, ExactRoutes, described, is_refused
from lmi_vllm.engine.vllm.workarounds import Scope, apply
from lmi_vllm.engine.vllm.workarounds.client_faults import leave_out_faults_of_clients
from lmi_vllm.engine.vllm.workarounds.ended_streams import end_with_the_engine
from lmi_vllm.engine.vllm.workarounds.kept_responses import keep_by_client
from lmi_vllm.engine.vllm.workarounds.messages import end_with_errors, with_objects
from lmi_vllm.engine.vllm.workarounds.parsers import limit_parsers
from lmi_vllm.engine.vllm.workarounds.request_bodies import check_body
from lmi_vllm.engine.vllm.workarounds.scored_texts import bound_scored_texts
from lmi_vllm.engine.vllm.workarounds.tool_calls import read_calls_alike
from lmi_vllm.errors import (
    EngineDeadError,
    EngineFailureError,
    EngineStartError,
    LmiError,
    RequestError,
)
from lmi_vllm.masked_urls import MOST_SHOWN, shown
from lmi_vllm.messages import (
    AdapterRef,
    HttpCall,
    HttpRoute,
    OpenAIReply,
    ServingProfile,
)
from lmi_vllm.multipart import boundary_of, with_field

logger = logging.getLogger(__name__)

ASLEEP_SECONDS: Final = 5.0  # seconds; an engine that does not answer is not asleep
# Routes that this server answers: health, LMI's own, metrics, the description of the API.
_OURS: Final = frozenset(
    {"/health", "/metrics", "/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect"}
)
# Keys and CORS are checked before; this server counts the requests of all lanes.
_REPLACED: Final = (
    "AuthenticationMiddleware", "CORSMiddleware", "PrometheusInstrumentatorMiddleware",
)  # fmt: skip

# Errors that vLLM's validators raise for a body of an unexpected shape, and vLLM answers with 500.
# ValueError and TypeError are 400 there, too.
_UNREAD: Final = (AttributeError, LookupError, RecursionError)


class KeyedLoads(UserDict[str, Any]):
    """vLLM's table of adapters: a load is found by its key, and by nothing else (DECISIONS.md 116).

    vLLM also goes through this table: it takes the load whose name is the first word of the type of
    a message's part (`text`, `image_url`). Clients choose those names, so it finds none.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Bridge:
    """vLLM's application: its routes, and its answers to calls."""

    def __init__(self, app: FastAPI, llm: GuardedAsyncLLM) -> None:
        self.app = app  # state of vLLM's handlers
        self._llm = llm
        self._secret = secrets.token_hex(16)
        self._is_changed = False  # by the user's code
        # vLLM's handler ends the process through it when the engine fails; the supervisor sees that
        # itself.
        app.state.server = SimpleNamespace(should_exit=False)

    @classmethod
    async def create(
        cls, llm: GuardedAsyncLLM, namespace: Namespace, profile: ServingProfile
    ) -> Self:
        """Return the application over `llm`, made as in `vllm serve` with the same arguments.

        Keys and allowed origins are not passed on: this server checks them before.
        """
        served = {
            "served_model_name": list(profile.served_names),
            "enable_auto_tool_choice": profile.enable_auto_tool_choice,
            "tool_call_parser": profile.tool_call_parser,
            "chat_template": profile.chat_template,
            "chat_template_content_format": profile.chat_template_content_format,
        }
        namespace = Namespace(**{**vars(namespace), **served})
        for plugin in (profile.tool_parser_plugin, namespace.reasoning_parser_plugin):
            if plugin and import_plugin(plugin) is None:  # it registers parsers by their names
                raise EngineStartError(f"the parsers of {plugin} cannot be imported: see the log")
        tasks = await llm.get_supported_tasks()
        with _same_root_logger(), apply(Scope.APPLICATION):
            app = build_app(namespace, tasks, llm.model_config)
        around = [(getattr(one.cls, "__name__", ""), one) for one in app.user_middleware]
        app.user_middleware = [one for name, one in around if name not in _REPLACED]
        _rebuild(app)
        for kind in _UNREAD:
            app.add_exception_handler(kind, _unreadable)
        with apply(Scope.APPLICATION):
            await init_app_state(llm, app.state, namespace, tasks)
        models = app.state.openai_serving_models
        models.lora_requests = KeyedLoads()
        models.lora_resolvers = []  # they load what a request's `model` names, past our registry
        read_calls_alike(app.state)
        limit_parsers(app.state)
        bound_scored_texts(app.state)
        end_with_errors(app.state)
        end_with_the_engine(app.state)
        leave_out_faults_of_clients()
        if (responses := getattr(app.state, "openai_serving_responses", None)) is not None:
            keep_by_client(responses)
        return cls(app, llm)

    def change(self, change: Callable[[Any], object]) -> None:
        """Let code of the user's change vLLM's application; see `HttpApplication`."""
        change(self.app)
        _rebuild(self.app)
        self._is_changed = True

    def add_adapter(self, adapter: AdapterRef) -> None:
        """Make this load of the adapter usable in calls.

        Users know this path; the engine's guard replaces it by the private copy.
        """
        known = self.app.state.openai_serving_models.lora_requests
        known[self.key(adapter)] = to_lora_request(adapter)

    def remove_adapter(self, adapter: AdapterRef) -> None:
        """Make this load of the adapter unusable in calls; other loads of its name stay."""
        self.app.state.openai_serving_models.lora_requests.pop(self.key(adapter), None)

    def key(self, adapter: AdapterRef) -> str:
        """Return the internal name of a load for `model`; no client can send such a name.

        vLLM looks adapters up by the request's name, which may mean another load by then, or one
        that is being removed. The answer has the adapter's own name.
        """
        return f"{self._secret}-{adapter.engine_id}"

    @functools.cached_property
    def routes(self) -> tuple[HttpRoute, ...]:
        """Every route of the application that this server does not answer itself."""
        return tuple(described(route) for route in self._routes)

    @functools.cached_property
    def _routes(self) -> tuple[APIRoute, ...]:
        ours = _OURS if self._is_changed else _OURS | SAGEMAKER.keys()
        routes = (route for route in self.app.routes if isinstance(route, APIRoute))
        return tuple(route for route in routes if route.path not in ours and not is_refused(route))

    @functools.cached_property
    def _exact(self) -> Mapping[tuple[str, str], HttpRoute]:
        """Routes whose path has no parameters, by method and path."""
        return {
            (method, route.path): described(route)
            for route in reversed(self._routes)  # the first one counts
            if "{" not in route.path
            for method in route.methods
        }

    @functools.cached_property
    def sees_every_request(self) -> bool:
        """Whether the user's code is around it or in it, or `/load` counts its answers."""
        args = self.app.state.args
        return bool(self._is_changed or args.middleware or args.enable_server_load_tracking)

    def find(self, method: str, path: str) -> HttpRoute | None:
        """Return the route of a request; also if only the method is wrong.

        A path with a missing or additional slash is redirected: such a route has no method.
        """
        if (route := self._match(method, path)) is not None:
            return route
        other = path.rstrip("/") if path.endswith("/") else f"{path}/"
        route = self._match(method, other)
        return None if route is None else replace(route, methods=frozenset())

    def _match(self, method: str, path: str) -> HttpRoute | None:
        if (exact := self._exact.get((method, path))) is not None:
            return exact
        scope = {"type": "http", "method": method, "path": path, "root_path": ""}
        matches = [(route.matches(scope)[0], route) for route in self._routes]
        wanted = [route for match, route in matches if match is Match.FULL]
        known = wanted or [route for match, route in matches if match is Match.PARTIAL]
        return described(known[0]) if known else None

    async def is_asleep(self) -> bool:
        """Whether the engine schedules nothing until it is woken; False if it does not answer."""
        try:
            return bool(await asyncio.wait_for(self._llm.is_sleeping(), ASLEEP_SECONDS))
        except (VllmEngineDeadError, TimeoutError):
            return False

    async def call(self, call: HttpCall, direct: DirectEvents | None = None) -> OpenAIReply:
        """Return the application's answer; one that is not complete at once is a stream.

        While `direct` is open, the events go there instead.

        Raises:
            EngineDeadError: the engine is gone.
            EngineFailureError: the application itself failed.
            RequestError: a conversation that is none, or an adapter is to answer what is neither a
                JSON object nor a form.
        """
        call = with_objects(call)
        responses = getattr(self.app.state, "openai_serving_responses", None)
        await check_body(call, ResponsesRequest, responses)
        body, renamed = call.body, None
        if (adapter := call.adapter) is not None:
            body, renamed = _for_model(call, self.key(adapter)), self._own_name(adapter)
        elif call.model:
            body = _for_model(call, call.model)
        exchange = Exchange(self.app, call, body, _stream_error, direct, renamed)
        try:
            reply = await exchange.reply()
        except BaseException:
            await exchange.aclose()
            raise
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR and self._llm.errored:
            await exchange.aclose()
            raise EngineDeadError
        if reply.status >= HTTPStatus.BAD_REQUEST and reply.stream is None:
            body = shown_body(reply.body)
            return reply if body == reply.body else replace(reply, body=body)
        return reply

    def with_own_name(self, reply: OpenAIReply, adapter: AdapterRef | None) -> OpenAIReply:
        """Return a whole answer without the adapter's key."""
        if adapter is None:
            return reply
        return replace(reply, body=reply.body.replace(*self._own_name(adapter)))

    def _own_name(self, adapter: AdapterRef) -> tuple[bytes, bytes]:
        """Return the key and the name, because some routes repeat `model` unchanged."""
        name = json.dumps(adapter.name, ensure_ascii=False)[1:-1]
        return self.key(adapter).encode(), name.encode()


def _rebuild(app: FastAPI) -> None:
    app.middleware_stack = None  # Starlette rebuilds it at the first request
    app.router.middleware_stack = ExactRoutes(app.router)


@contextlib.contextmanager
def _same_root_logger() -> Iterator[None]:
    """Restore the root logger, which SageMaker's library in vLLM changes when it is imported."""
    root = logging.getLogger()
    level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = [handler for handler, _ in handlers]
        for handler, own_level in handlers:
            handler.setLevel(own_level)


def shown_body(body: bytes) -> bytes:
    """Return the body of an error; one with a field of the request is still what it was, JSON."""
    text = body.decode(errors="replace")
    if len(text) > MOST_SHOWN:
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(_shown_texts(json.loads(text)), separators=(",", ":")).encode()
    return shown(text).encode()


def _shown_texts(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return {shown(name): _shown_texts(one) for name, one in value.items()}
    return [_shown_texts(one) for one in value] if isinstance(value, list) else value


async def _unreadable(_: Request, error: Exception) -> Response:
    """Answer 400 for a request that cannot be read; the application handles later failures."""
    frames = traceback.walk_tb(error.__traceback__)
    if all(frame.f_code is not solve_dependencies.__code__ for frame, _ in frames):
        raise error
    response = create_error_response(f"the request cannot be read: {error}")
    return JSONResponse(response.model_dump(), response.error.code)


def _stream_error(error: BaseException) -> LmiError:
    """Return our error for the exception that ended a stream after its first event.

    Chat and completions end with an error event; generators of other routes raise.
    """
    if isinstance(error, BaseExceptionGroup):  # of the tasks that Starlette runs for a stream
        return _stream_error(error.exceptions[0])
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return _stream_error(error.__cause__)  # Starlette's own, where the answer has begun
    if isinstance(error, VllmEngineDeadError):
        return EngineDeadError()
    answer = create_error_response(error).error if isinstance(error, Exception) else None
    if answer is None or answer.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return EngineFailureError("vLLM failed in a stream" if answer is None else answer.message)
    return RequestError(answer.message)


def _for_model(call: HttpCall, model: str) -> bytes:
    """Return the body with another `model`, because vLLM has no field for an adapter.

    Raises:
        RequestError: it is neither a JSON object nor a form, so the base model would answer in the
            adapter's place.
    """
    if boundary := boundary_of(call.content_type):
        return with_field(call.body, boundary, "model", model)
    try:
        fields = json.loads(call.body).items()
        payload = {name: value for name, value in fields if name != "adapters"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise RequestError(
            "an adapter answers JSON objects and forms only, and the body is neither"
        ) from error
    return json.dumps({**payload, "model": model}).encode()
