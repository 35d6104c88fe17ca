"""The adapter of a request as Ray's multiplexed model id, so that it stays on its replica.

Ray reads the id from a header. This middleware of Ray's proxies adds it, by the rules of
`inference.context`: the header of SageMaker, the query, the body. A request without the header of
Ray goes to any replica, and is answered as well.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

import orjson
from starlette.middleware import Middleware

from lmi_vllm.features.ray_serve.relay import MODEL_ID_HEADER, Message, Receive, Send
from lmi_vllm.inference.request.lmi import ADAPTER_HEADER, NAMES_OF_ADAPTERS
from lmi_vllm.inference.request.tgi import TGI_NAMES

LONGEST_BODY: Final = 1 << 20  # bytes; longer ones are passed on unread
NAMES_SECONDS: Final = 60.0  # for which the names of the served model are known
RETRY_SECONDS: Final = 5.0  # after they could not be read
ASK_SECONDS: Final = 5.0  # that requests wait for them
MOST_PREFIXES: Final = 64  # a client may write any; those asked for last are known
_MODELS: Final = "/v1/models"
_OK: Final = 200


def middlewares() -> list[Middleware]:
    """Return what Ray's proxies add: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this."""
    return [Middleware(AdapterMiddleware)]


class AdapterMiddleware:
    """Adds Ray's header to requests whose adapter can be told."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._known: dict[str, _ServedNames] = {}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Pass the request on, with the header where it names an adapter."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if MODEL_ID_HEADER in headers or MODEL_ID_HEADER.replace(b"_", b"-") in headers:
            await self._app(scope, receive, send)
            return
        name = _named_outside(scope, headers)
        if name is None and _is_short_json(headers):
            receive, body = await _read(receive)
            name = await self._named_in(body, scope)
        if name and name.isprintable():  # a line break would be another header
            scope["headers"] = [*scope["headers"], (MODEL_ID_HEADER, name.encode())]
        await self._app(scope, receive, send)

    async def _named_in(self, body: bytes, scope: Mapping[str, Any]) -> str:
        try:
            payload = orjson.loads(body)
        except orjson.JSONDecodeError:
            return ""  # the server says what is wrong with it
        if not isinstance(payload, dict):
            return ""
        if (name := _chosen(payload)) is not None:
            return name
        model = payload.get("model")
        if "inputs" in payload or not isinstance(model, str) or model in TGI_NAMES:
            return ""
        names = await self._served_names(scope)
        return "" if names is None or model in names else model

    async def _served_names(self, scope: Mapping[str, Any]) -> frozenset[str] | None:
        """Return the names of the base model, which any replica answers; None: not known."""
        prefix = _prefix(scope["path"])
        known = self._known.pop(prefix, None) or _ServedNames()
        self._known[prefix] = known
        if len(self._known) > MOST_PREFIXES:
            del self._known[next(iter(self._known))]
        async with known.asking:
            if time.monotonic() > known.until:
                names = await self._ask_for_names(prefix, scope)
                # One client's key may be wrong, and others' right.
                known.names = known.names if names is None else names
                pause = RETRY_SECONDS if names is None else NAMES_SECONDS
                known.until = time.monotonic() + pause
        return known.names

    async def _ask_for_names(self, prefix: str, scope: Mapping[str, Any]) -> frozenset[str] | None:
        path = prefix + _MODELS
        credentials = [
            (name, value)
            for name, value in scope["headers"]
            if name.lower() in (b"authorization", b"x-api-key", b"host")
        ]
        asked = {
            **scope, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": credentials,
        }  # fmt: skip
        answer = _Answer()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_SECONDS):
                await self._app(asked, answer.receive, answer.send)
        return _base_names(answer.body) if answer.status == _OK else None


@dataclass
class _ServedNames:
    """The names of the base model below one prefix; None: not known."""

    names: frozenset[str] | None = None
    until: float = 0.0
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


def _base_names(body: bytes | bytearray) -> frozenset[str] | None:
    """Return the names in a list of models; None where another application's answer is no list."""
    try:
        models = orjson.loads(body)["data"]
        return frozenset(str(model["id"]) for model in models if model.get("parent") is None)
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        return None


class _Answer:
    """The answer to a request without a body."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self._is_asked = False

    async def receive(self) -> Message:
        if self._is_asked:
            await asyncio.Event().wait()  # the client stays
        self._is_asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


def _named_outside(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> str | None:
    """Return the adapter of the header or the query, "" for the base model, None for neither."""
    if (named := headers.get(ADAPTER_HEADER.encode())) is not None:
        return named.decode("latin-1")
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return query["adapter"][0] if "adapter" in query else None


def _chosen(payload: Mapping[str, Any]) -> str | None:
    """Return the adapter that LMI's fields name; of a list the first."""
    parameters = payload.get("parameters")
    places = [(payload, "adapters")]
    if isinstance(parameters, dict):
        places += [(parameters, name) for name in NAMES_OF_ADAPTERS]
    for fields, name in places:
        if fields.get(name) is not None:
            named = fields[name]
            first = next(iter(named), "") if isinstance(named, list) else named
            return first if isinstance(first, str) else ""
    return None


def _is_short_json(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a body may be read here: JSON of a length that is said."""
    length = headers.get(b"content-length", b"")
    is_json = b"json" in headers.get(b"content-type", b"json")
    return is_json and length.isdigit() and int(length) <= LONGEST_BODY


async def _read(receive: Receive) -> tuple[Receive, bytes]:
    """Return the body, and a `receive` that gives it once more."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    waiting = iter(messages)

    async def again() -> Message:
        return next(waiting, None) or await receive()

    return again, b"".join(message.get("body", b"") for message in messages)


def _prefix(path: str) -> str:
    """Return the prefix under which Ray serves the application, by the route in it."""
    return next(
        (path.partition(route)[0] for route in ("/v1/", "/v2/", "/invocations") if route in path),
        "",
    )
