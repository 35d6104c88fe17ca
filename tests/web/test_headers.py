import asyncio
import re
import uuid

import pytest
from aiohttp.test_utils import TestClient
from yarl import URL

from lmi_vllm.messages import ServingProfile
from lmi_vllm.web import sleep_route
from lmi_vllm.web.request import OPEN_PATHS, WebOptions
from tests.conftest import ServeScripted
from tests.web.conftest import STREAM, queue_of, send_raw

CUSTOM = "X-Amzn-SageMaker-Custom-Attributes"
NO_CACHE = {
    "Pragma": "no-cache",
    "Cache-Control": "no-cache; no-store, must-revalidate, private",
    "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}
CALLS = {
    "ping": ("GET", "/ping", None),
    "inference": ("POST", "/invocations", {"inputs": "x"}),
    "stream": ("POST", "/invocations", STREAM),
    "openai": ("POST", "/v1/completions", {"prompt": "x"}),
    "management": ("GET", "/metrics", None),
    "client fault": ("POST", "/invocations", {}),
    "not found": ("GET", "/nothing", None),
}


@pytest.mark.parametrize(("method", "path", "body"), CALLS.values(), ids=CALLS)
async def test_headers_of_every_answer(
    serve: ServeScripted, method: str, path: str, body: object
) -> None:
    """No answer is cached, and every one has an id, errors and streams included."""
    response = await (await serve()).request(method, path, json=body)
    assert {name: response.headers.getall(name) for name in NO_CACHE} == {
        name: [value] for name, value in NO_CACHE.items()
    }
    assert uuid.UUID(response.headers["x-request-id"])
    assert "request_tracking_id" not in response.headers


@pytest.mark.parametrize(("method", "path", "body"), CALLS.values(), ids=CALLS)
async def test_headers_connection_and_length(
    serve: ServeScripted, method: str, path: str, body: object
) -> None:
    """Errors keep the connection, too; whole answers have a length and streams are chunked."""
    response = await (await serve()).request(method, path, json=body)
    assert "Connection" not in response.headers
    is_stream = body is STREAM
    assert ("Content-Length" in response.headers) is not is_stream
    assert (response.headers.get("Transfer-Encoding") == "chunked") is is_stream


POST = b"POST /nothing HTTP/1.1\r\nHost: x\r\n"
NEXT = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
UNREAD = {
    "large": b"Content-Length: 65537\r\n\r\nhel",
    "of no length": b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n",
    "to be asked for": b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
}


@pytest.mark.parametrize("body", UNREAD.values(), ids=UNREAD)
async def test_error_closes_the_connection_if_the_body_was_not_read(
    serve: ServeScripted, body: bytes
) -> None:
    """What is left of the body would be read as the next request."""
    client = await serve()
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(POST + body)
    answer = await reader.readuntil(b"HTTP/1.1 404 Not Found") + await reader.readuntil(b"}\n")
    assert b"connection: close" in answer.lower()
    writer.close()


async def test_error_keeps_the_connection_if_the_rest_of_the_body_is_short(
    serve: ServeScripted,
) -> None:
    """Clients send headers and body in two pieces: the second may come after the refusal."""
    client = await serve()
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(POST + b"Content-Length: 5\r\n\r\nhel")
    await asyncio.sleep(0.05)
    writer.write(b"lo" + NEXT)
    answers = await reader.readuntil(b'{"status":"Healthy"}')
    assert answers.startswith(b"HTTP/1.1 404 ")
    assert answers.count(b"HTTP/1.1 ") == 2
    assert b"connection: close" not in answers.lower()
    writer.close()


IDS = {
    "default header": (WebOptions(), "X-Request-Id", "abc-1", "abc-1"),
    "sagemaker": (
        WebOptions(request_id_header="X-Amzn-SageMaker-Inference-Id"),
        "x-amzn-sagemaker-inference-id",
        "abc-1",
        "abc-1",
    ),
    "another header": (WebOptions(request_id_header="my-id"), "x-request-id", "abc-1", None),
    "empty": (WebOptions(), "x-request-id", "", None),
    "not ASCII": (WebOptions(), "x-request-id", "é", None),
    "tab": (WebOptions(), "x-request-id", "a\tb", None),
}


@pytest.mark.parametrize(("options", "header", "given", "back"), IDS.values(), ids=IDS)
async def test_headers_request_id(
    serve: ServeScripted, options: WebOptions, header: str, given: str, back: str | None
) -> None:
    """The client's id comes back under x-request-id; without a usable one it is a new UUID."""
    client = await serve(options=options)
    response = await client.get("/ping", headers={header: given})
    found = response.headers["x-request-id"]
    assert found == back if back else uuid.UUID(found)


async def test_headers_cross_origin(serve: ServeScripted) -> None:
    """Cross-origin headers are on every answer when configured, and absent otherwise."""
    cors = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Methods": "POST"}
    client = await serve(options=WebOptions(cors_headers=cors))
    for method in ("GET", "OPTIONS"):
        headers = (await client.request(method, "/")).headers
        assert {name: headers[name] for name in cors} == cors
        assert headers["Access-Control-Expose-Headers"] == "*"


@pytest.mark.parametrize(
    ("configured", "allowed"), [({}, "authorization, x-mine"), ({"Headers": "x-ours"}, "x-ours")]
)
async def test_preflight_allows_the_headers_that_are_asked_for(
    serve: ServeScripted, configured: dict[str, str], allowed: str
) -> None:
    """Where none are configured: a browser sends JSON, or a key, only after that."""
    configured = {"Origin": "http://a.example", **configured}
    cors = {f"Access-Control-Allow-{name}": value for name, value in configured.items()}
    client = await serve(options=WebOptions(cors_headers=cors, api_keys=("k",)))
    asks = {
        "Origin": "http://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-mine",
    }
    response = await client.options("/v1/chat/completions", headers=asks)
    assert response.status == 200
    assert response.headers.getall("Access-Control-Allow-Headers") == [allowed]
    assert response.headers["Access-Control-Allow-Origin"] == "http://a.example"
    assert response.headers["Access-Control-Max-Age"] == "600"


INVITED = WebOptions(
    cors_headers={
        "Access-Control-Allow-Origin": "https://a.example, https://b.example",
        "Access-Control-Allow-Methods": "POST",
    }
)


@pytest.mark.parametrize("origin", ["https://a.example", "https://b.example"])
async def test_matching_origin_is_the_only_one_named(serve: ServeScripted, origin: str) -> None:
    """A browser refuses a header that names two."""
    client = await serve(options=INVITED)
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    for answer in (
        await client.options("/invocations", headers=asks),
        await client.post("/invocations", headers={"Origin": origin}, json={"inputs": "a"}),
    ):
        assert answer.status == 200
        assert answer.headers.getall("Access-Control-Allow-Origin") == [origin]
        assert answer.headers["Access-Control-Expose-Headers"] == "*"  # the token of a deferred one
        assert answer.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    ("origin", "status"), [("https://a.example", 200), ("https://c.example", 403)]
)
async def test_unlisted_origin_may_change_nothing(
    serve: ServeScripted, origin: str, status: int
) -> None:
    """A browser sends a simple request without asking first."""
    client = await serve(options=INVITED)
    headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
    answer = await client.post("/invocations", headers=headers, json={"inputs": "a"})
    assert answer.status == status


async def test_star_among_several_origins_is_every_origin(serve: ServeScripted) -> None:
    """As vLLM reads such a list."""
    origins = {"Access-Control-Allow-Origin": "*, https://a.example"}
    client = await serve(options=WebOptions(cors_headers=origins))
    answer = await client.get("/ping", headers={"Origin": "https://c.example"})
    assert answer.headers["Access-Control-Allow-Origin"] == "*"


async def test_unlisted_origin_gets_no_cors_headers(serve: ServeScripted) -> None:
    """Neither is a client that is no browser; caches keep the two answers apart."""
    client = await serve(options=INVITED)
    strange = {"Origin": "https://c.example"}
    asks = {**strange, "Access-Control-Request-Method": "POST"}
    for answer in (
        await client.options("/invocations", headers=asks),
        await client.post("/invocations", headers=strange, json={"inputs": "a"}),
        await client.get("/ping"),
    ):
        assert not [name for name in answer.headers if name.startswith("Access-Control")]
        assert answer.headers["Vary"] == "Origin"


async def test_headers_no_cross_origin_unasked(serve: ServeScripted) -> None:
    """Without configuration no origin is allowed."""
    headers = (await (await serve()).get("/ping")).headers
    assert not [name for name in headers if name.startswith("Access-Control")]


KEYS = WebOptions(api_keys=("first", "sécond"))
GIVEN = {
    "none": ({}, 401),
    "bearer": ({"Authorization": "Bearer first"}, 200),
    "bearer, lower case": ({"Authorization": "bearer first"}, 200),
    "second key": ({"Authorization": "Bearer sécond"}, 200),
    "x-api-key": ({"x-api-key": "first"}, 200),
    "x-api-key beside another scheme": ({"Authorization": "Basic eA==", "x-api-key": "first"}, 200),
    "wrong": ({"Authorization": "Bearer firs"}, 401),
    "longer": ({"Authorization": "Bearer first1"}, 401),
    "other scheme": ({"Authorization": "Basic first"}, 401),
    "no scheme": ({"Authorization": "first"}, 401),
    "empty": ({"Authorization": "Bearer ", "x-api-key": ""}, 401),
}


@pytest.mark.parametrize(("headers", "status"), GIVEN.values(), ids=GIVEN)
async def test_headers_api_key(serve: ServeScripted, headers: dict[str, str], status: int) -> None:
    """Any of the keys opens, in either header; nothing else does."""
    client = await serve(options=KEYS)
    response = await client.post("/invocations", json={"inputs": "x"}, headers=headers)
    assert response.status == status
    assert (response.headers.get("WWW-Authenticate") == "Bearer") is (status == 401)


async def test_headers_api_key_that_is_renewed(serve: ServeScripted) -> None:
    """The keys of now count, on every route: a revoked one is refused at once."""
    keys = [(0, "first")]
    options = WebOptions(api_keys=("first",), renewed_keys=lambda: keys)
    client = await serve(options=options)
    for path in ("/v1/models", "/metrics", "/adapters", "/nothing"):
        keys[:] = [(0, "first")]
        assert (await client.get(path, headers={"x-api-key": "first"})).status != 401
        keys[:] = [(1, "second")]
        assert (await client.get(path, headers={"x-api-key": "first"})).status == 401
        assert (await client.get(path, headers={"x-api-key": "second"})).status != 401


@pytest.mark.parametrize("header", [b"x-api-key: ", b"Authorization: Bearer "], ids=repr)
async def test_headers_api_key_that_is_no_text(serve: ServeScripted, header: bytes) -> None:
    """Bytes that are no UTF-8 are a wrong key like any other."""
    answer = await send_raw(await serve(options=KEYS), header + b"\xff")
    assert answer.startswith(b"HTTP/1.1 401 ")


PARTS = {"model": "demo", "version": "1", "action": "update"}
PROBES = {"/v2/health/live", "/v2/health/ready", "/v2/models/demo/ready"}
PROBES |= {"/v2/models/demo/versions/1/ready", *OPEN_PATHS}


def concrete_routes(client: TestClient) -> set[tuple[str, str]]:
    """Return every route of the application as a method and a path that exists."""
    return {
        (
            "POST" if route.method == "*" else route.method,
            re.sub(r"{(\w+)}", lambda part: PARTS.get(part[1], "a"), route.resource.canonical),
        )
        for route in client.app.router.routes()
    }


async def test_headers_api_key_is_demanded_on_every_route(serve: ServeScripted) -> None:
    """Every route there is wants the key, and so does one that is not; health is open."""
    client = await serve(options=KEYS)
    for method, path in {*concrete_routes(client), ("GET", "/nothing")}:
        status = (await client.request(method, path)).status
        assert (status != 401) is (path in PROBES), (method, path)


async def test_headers_api_key_is_demanded_whatever_a_name_in_the_path_says(
    serve: ServeScripted,
) -> None:
    """A name that ends like the path of a probe, its slashes encoded, opens no other route."""
    client = await serve(options=KEYS)
    routes = [(one.method, one.resource.canonical) for one in client.app.router.routes()]
    named = [(method, route) for method, route in routes if "{" in route and "ready" not in route]
    for name in ("1%2Fready", "health%2Flive", "..%2f..%2fping"):
        for method, route in named:
            path = URL(re.sub(r"{\w+}", name, route), encoded=True)
            answer = await client.request("POST" if method == "*" else method, path)
            assert answer.status == 401, (method, path)


BODIES = {
    "server": (
        "/metrics",
        False,
        b'{\n  "code": 401,\n  "type": "UnauthorizedException",\n',
    ),
    "lmi": ("/invocations", False, b'{\n  "code": 401,\n  "type": "UnauthorizedException",\n'),
    "tgi": ("/invocations", True, b'{\n  "code": 401,\n  "type": "UnauthorizedException",\n'),
    "openai": ("/v1/completions", False, b'{"error":{"message":"A valid API key is required: '),
}


@pytest.mark.parametrize(("path", "is_tgi", "start"), BODIES.values(), ids=BODIES)
async def test_headers_api_key_error_body(
    serve: ServeScripted, path: str, is_tgi: bool, start: bytes
) -> None:
    """The refusal is in the server's shape, on /v1 in OpenAI's."""
    profile = ServingProfile(model_name="demo", tgi_compat=is_tgi)
    client = await serve(profile, options=KEYS)
    body = await (await client.post(path)).read()
    assert body.startswith(start)
    assert queue_of(client).in_flight == 0


ALLOWED = {
    "/invocations": ("DELETE", "OPTIONS, POST"),
    "/predictions/demo": ("GET", "OPTIONS, POST"),
    "/v1/completions": ("OPTIONS", "POST"),
    "/v1/models": ("POST", "GET, HEAD"),
    "/ping": ("DELETE", "GET, HEAD, POST"),
    "/metrics": ("POST", "GET, HEAD"),
}
PLACES = {"model": "demo", "version": "1", "name": "a", "action": "update", "response_id": "x"}


@pytest.mark.parametrize(("path", "method", "allow"), [(p, *v) for p, v in ALLOWED.items()])
async def test_wrong_method_says_which_are_right(
    serve: ServeScripted, path: str, method: str, allow: str
) -> None:
    """405 carries Allow (RFC 9110, 15.5.6)."""
    await check_wrong_method(await serve(), path, method, allow)


async def check_wrong_method(client: TestClient, path: str, method: str, allow: str) -> None:
    """A method is refused, and the answer names those that are right."""
    response = await client.request(method, path)
    assert response.status == 405
    assert response.headers["Allow"] == allow


async def test_allow_header_matches_every_route(
    serve: ServeScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No 405 without Allow, and no method in it is itself answered with 405."""
    monkeypatch.setattr(sleep_route, "GIVE_BACK_SECONDS", 0.01)  # nothing here puts it to sleep
    client = await serve(ServingProfile(model_name="demo", tgi_compat=True, enable_lora=True))
    paths = {route.resource.canonical.format(**PLACES) for route in client.app.router.routes()}
    for path in sorted(paths - {"/"}):  # which is there for OPTIONS only
        await check_allow(client, path)


async def check_allow(client: TestClient, path: str) -> None:
    """A wrong method is refused, and those of its answer's `Allow` are not."""
    refused = await client.request("PATCH", path)
    assert refused.status == 405, path
    for method in refused.headers["Allow"].split(", "):
        answer = await client.request(method, path, data=b"{}")
        assert answer.status != 405, (method, path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", '"type": "ExpectationFailedException"'),
        ("/v1/completions", '"type":"BadRequestError"'),
        ("/:models/lmi/invoke", '"type": "ExpectationFailedException"'),  # there is none such
        ("/metrics", '"type": "ExpectationFailedException"'),  # which is only read
    ],
)
async def test_unknown_expectation_is_417_in_the_route_s_shape(
    serve: ServeScripted, path: str, body: str
) -> None:
    """Expect may only ask for 100-continue; the refusal has an id like every other."""
    client = await serve()
    for expectation in ("200-maybe", "\udcff\udcfe-continue"):  # which is not UTF-8
        headers = {"Expect": expectation}
        response = await client.post(path, json={"inputs": "x"}, headers=headers)
        assert response.status == 417
        assert response.content_type == "application/json"
        assert response.headers["x-request-id"]
        assert body in await response.text()


async def test_expectation_of_continue_is_met_before_the_body(serve: ServeScripted) -> None:
    """A client that waits gets 100, sends its body and gets its answer."""
    client = await serve()
    reader, writer = await asyncio.open_connection(client.host, client.port)
    head = "POST /invocations HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\n"
    writer.write(f"{head}Content-Length: 14\r\nConnection: close\r\n\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b'{"inputs":"x"}')
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
async def test_body_that_is_too_large_is_not_asked_for(serve: ServeScripted, path: str) -> None:
    """A client that asks first is told at once, and not after `max_request_size` bytes."""
    client = await serve(options=WebOptions(max_request_size=100))
    reader, writer = await asyncio.open_connection(client.host, client.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 101\r\n\r\n"
    writer.write(head.encode())
    answer = await asyncio.wait_for(reader.readuntil(b"max_request_size (100 bytes)"), 20)
    assert answer.startswith(b"HTTP/1.1 413 ")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("headers", [{"handler": "x"}, {CUSTOM: "handler=x"}], ids=str)
async def test_handler_override_only_where_allowed(
    serve: ServeScripted, headers: dict[str, str]
) -> None:
    """ALLOW_REQUEST_HANDLER_OVERRIDE turns the refusal of a `handler` property off."""
    client = await serve(options=WebOptions(allows_handler_override=True))
    assert (await client.post("/invocations", json={"inputs": "x"}, headers=headers)).status == 200
    client = await serve()
    assert (await client.post("/invocations", json={"inputs": "x"}, headers=headers)).status == 400


async def test_preflight_needs_no_key(serve: ServeScripted) -> None:
    """Browsers ask without credentials; everything else still needs the key."""
    cors = {"Access-Control-Allow-Origin": "https://a.example"}
    client = await serve(options=WebOptions(cors_headers=cors, api_keys=("k",)))
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    for path in ("/invocations", "/metrics", "/v1/completions"):
        answer = await client.options(path, headers=asks)
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert (await client.options(path)).status == 401
    assert (await client.post("/invocations", headers=asks, json={"inputs": "a"})).status == 401
    plain = await serve(options=WebOptions(api_keys=("k",)))
    assert (await plain.options("/invocations", headers=asks)).status == 401


@pytest.mark.parametrize(
    ("accept", "framing"),
    [
        (None, "text/event-stream"),
        ("*/*", "text/event-stream"),
        ("application/jsonlines", "application/jsonlines"),
        ("text/html", "application/jsonlines"),
    ],
)
async def test_headers_platform_s_accept_is_of_requests_without_one(
    serve: ServeScripted, accept: str | None, framing: str
) -> None:
    """SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT chooses where the client leaves it open."""
    client = await serve(options=WebOptions(default_accept="text/event-stream"))
    headers = {} if accept is None else {"Accept": accept}
    skipped = () if accept else ("Accept",)
    answer = await client.post(
        "/invocations", json=STREAM, headers=headers, skip_auto_headers=skipped
    )
    assert answer.content_type == framing


PAGES = {
    "foreign": ({"Origin": "http://evil.example"}, 403),
    "foreign, by IP": ({"Origin": "http://192.0.2.1:8080"}, 403),
    "no origin at all": ({"Origin": "null"}, 403),
    "another port": ({"Origin": "http://server.example:1"}, 403),
    "not a URL": ({"Origin": "http://["}, 403),
    "own": ({"Origin": "http://server.example:8080"}, 200),
    "behind a proxy": (
        {"Origin": "https://front.example", "X-Forwarded-Host": "front.example:443"}, 200,
    ),
    "own, by its own word": ({"Origin": "http://x", "Sec-Fetch-Site": "same-origin"}, 200),
    "no browser": ({}, 200),
}  # fmt: skip


@pytest.mark.parametrize(("headers", "status"), PAGES.values(), ids=PAGES)
async def test_origin_is_compared_where_a_browser_says_no_more(
    serve: ServeScripted, headers: dict[str, str], status: int
) -> None:
    """To http addresses that are not loopback browsers send no Sec-Fetch-Site."""
    client = await serve()
    sent = {"Host": "server.example:8080", **headers}
    answer = await client.post("/invocations", headers=sent, json={"inputs": "a"})
    assert answer.status == status
    if status == 403:
        assert "cors_allowed_origin allows such sites" in await answer.text()
