"""The middleware of Ray's proxies: Ray's header has the adapter, and base models have none."""

import asyncio
import json
from typing import Any

import pytest

from lmi_vllm.features.ray_serve import adapters
from lmi_vllm.features.ray_serve.adapters import (
    LONGEST_BODY,
    MOST_PREFIXES,
    AdapterMiddleware,
)
from lmi_vllm.features.ray_serve.relay import Message, Receive, Send

MODELS = {"data": [{"id": "base", "parent": None}, {"id": "fr", "parent": "base"}]}
SAGEMAKER = b"X-Amzn-SageMaker-Adapter-Identifier"
RAY = b"serve_multiplexed_model_id"


class App:
    """What comes behind the middleware: it keeps requests, and lists the models."""

    def __init__(self, status: int = 200, models: Any = None) -> None:
        self.status, self.lists = status, 0
        self.models = MODELS if models is None else models
        self.is_stuck = False
        self.asked: list[tuple[dict[bytes, bytes], bytes]] = []
        self.credentials: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Read the body and keep it, or list the models."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"].endswith("/v1/models"):
            self.lists += 1
            self.credentials.append(dict(scope["headers"]))
            if self.is_stuck:
                await asyncio.Event().wait()
            await send({"type": "http.response.start", "status": self.status, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(self.models).encode()})
        else:
            self.asked.append((dict(scope["headers"]), body))


async def ask(
    middleware: AdapterMiddleware,
    body: Any,
    path: str = "/invocations",
    query: bytes = b"",
    headers: dict[bytes, bytes] | None = None,
) -> None:
    """Send a request whose body comes in two pieces."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    pieces = [sent[:5], sent[5:]]

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    given = {b"content-type": b"application/json", b"content-length": str(len(sent)).encode()}
    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": query,
        "headers": list((given | (headers or {})).items()),
    }  # fmt: skip
    await middleware(scope, receive, send)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"body": {"inputs": "a", "adapters": "fr"}}, b"fr"),
        ({"body": {"inputs": ["a", "b"], "adapters": ["de", "fr"]}}, b"de"),
        ({"body": {"inputs": "a", "parameters": {"adapter_id": "fr"}}}, b"fr"),
        ({"body": {"inputs": "a", "parameters": {"adapters": "fr"}}}, b"fr"),
        ({"body": {"inputs": "a"}, "headers": {SAGEMAKER: b"fr"}}, b"fr"),
        ({"body": {"inputs": "a", "adapters": "de"}, "query": b"adapter=fr"}, b"fr"),
        ({"body": {"model": "fr", "messages": []}, "path": "/v1/chat/completions"}, b"fr"),
        ({"body": {"model": "new", "prompt": "a"}, "path": "/ray/v1/completions"}, b"new"),
        ({"body": {"model": "base", "messages": []}, "path": "/v1/messages"}, None),
        ({"body": {"model": "tgi", "messages": []}, "path": "/v1/chat/completions"}, None),
        ({"body": {"model": "any", "inputs": "a"}}, None),
        ({"body": {"inputs": "a", "adapters": ""}}, None),
        ({"body": {"inputs": "a", "adapters": "fr\r\nx-own: 1"}}, None),
        ({"body": {"inputs": "a", "adapters": "fr\nx"}, "query": b"adapter=fr%0Ax"}, None),
        ({"body": {"inputs": "a", "adapters": 5}}, None),
        ({"body": {"model": ["fr"]}}, None),
        ({"body": b"{broken"}, None),
        ({"body": b"[1, 2]"}, None),
        ({"body": {"adapters": "fr"}, "headers": {b"content-type": b"text/plain"}}, None),
        ({"body": {"adapters": "fr", "inputs": "a" * LONGEST_BODY}}, None),
        ({"body": {"adapters": "fr"}, "headers": {RAY: b"client"}}, b"client"),
        ({"body": {"adapters": "fr"}, "headers": {b"serve-multiplexed-model-id": b"x"}}, None),
    ],
)
async def test_header_has_the_adapter(fields: dict[str, Any], name: bytes | None) -> None:
    """By the rules of the server; the body goes on unchanged."""
    app = App()
    await ask(AdapterMiddleware(app), **fields)
    ((headers, body),) = app.asked
    sent = fields["body"]
    assert body == (sent if isinstance(sent, bytes) else json.dumps(sent).encode())
    assert headers.get(RAY) == name


async def test_models_are_asked_for_once_with_the_key_of_the_client() -> None:
    """A list that is refused is asked for again later, and names nothing meanwhile."""
    app = App()
    middleware = AdapterMiddleware(app)
    for _ in range(3):
        await ask(middleware, {"model": "fr"}, "/v1/x", headers={b"authorization": b"Bearer k"})
    assert app.lists == 1
    assert app.credentials == [{b"authorization": b"Bearer k"}]
    app = App(status=401)
    middleware = AdapterMiddleware(app)
    for _ in range(3):
        await ask(middleware, {"model": "fr"}, "/v1/x")
    assert app.lists == 1
    assert [RAY in headers for headers, _ in app.asked] == [False] * 3


async def test_wrong_key_of_one_client_hides_no_names_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was known stays, when the list is asked for again and refused."""
    monkeypatch.setattr(adapters, "NAMES_SECONDS", -1.0)
    app = App()
    middleware = AdapterMiddleware(app)
    await ask(middleware, {"model": "fr"}, "/v1/x")
    app.status = 401
    await ask(middleware, {"model": "fr"}, "/v1/x")
    assert app.lists == 2
    assert [headers.get(RAY) for headers, _ in app.asked] == [b"fr", b"fr"]


@pytest.mark.parametrize("models", [[], {}, {"data": 5}, {"data": [5]}, {"data": [{}]}, "text"])
async def test_other_applications_have_other_answers(models: Any) -> None:
    """Ray's proxies have one middleware for all applications; a request of another one passes."""
    app = App(models=models)
    await ask(AdapterMiddleware(app), {"model": "fr"}, "/other/v1/x")
    ((headers, _),) = app.asked
    assert RAY not in headers


async def test_list_that_does_not_come_holds_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica may be busy, or still start."""
    monkeypatch.setattr(adapters, "ASK_SECONDS", 0.01)
    app = App()
    app.is_stuck = True
    await ask(AdapterMiddleware(app), {"model": "fr"}, "/v1/x")
    assert [RAY in headers for headers, _ in app.asked] == [False]


async def test_prefixes_that_clients_invent_take_no_memory() -> None:
    """The one that is asked for stays known."""
    app = App()
    middleware = AdapterMiddleware(app)
    for number in range(3 * MOST_PREFIXES):
        await ask(middleware, {"model": "fr"}, f"/{number}/v1/x")
        await ask(middleware, {"model": "fr"}, "/v1/x")
    assert app.lists == 3 * MOST_PREFIXES + 1
    assert len(middleware._known) == MOST_PREFIXES
