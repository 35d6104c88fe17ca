"""`route=` in SageMaker's custom attributes: the request is that route's, if it is of inference."""

import json
from typing import Final

import pytest
from aiohttp import FormData
from aiohttp.test_utils import TestClient
from multidict import CIMultiDict

from lmi_vllm.errors import Dialect
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import HttpRoute, RouteKind, ServingProfile
from lmi_vllm.web.inference_routes import request_properties
from lmi_vllm.web.request import SERVICE, WebOptions
from tests.conftest import ServeScripted
from tests.support.queue import admitted
from tests.support.scripted_application import EchoingApplication
from tests.web.conftest import LORA, queue_of, register
from tests.web.test_metrics import grown, samples

POST: Final = frozenset({"POST"})
HEADER: Final = "X-Amzn-SageMaker-Custom-Attributes"
SOUND: Final = "/v1/audio/transcriptions"
MESSAGES: Final = "/v1/messages"
ROUTES: Final = (
    HttpRoute(SOUND, POST, RouteKind.INFERENCE, Dialect.OPENAI),
    HttpRoute(MESSAGES, POST, RouteKind.INFERENCE, Dialect.ANTHROPIC),
    HttpRoute("/sleep", POST, RouteKind.MANAGEMENT, Dialect.OPENAI),
    HttpRoute("/version", frozenset({"GET"}), RouteKind.INFORMATION, Dialect.OPENAI),
)
CHAT: Final = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def application(engine: ScriptedEngine) -> EchoingApplication:
    """The application of the scripted engine, which answers with the body."""
    engine.http = EchoingApplication(engine, ROUTES)
    return engine.http


async def ask(
    client: TestClient, attributes: str, body: object, path: str = "/invocations", **headers: str
) -> tuple[int, bytes]:
    """Return status and body of a request with custom attributes."""
    data = body if isinstance(body, bytes | FormData) else json.dumps(body).encode()
    kind = {} if isinstance(body, FormData) else {"Content-Type": "application/json"}
    headers = {HEADER: attributes, "x-request-id": "7", **kind, **headers}
    async with client.post(path, data=data, headers=headers) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize(
    "attributes",
    [
        f"route={SOUND}",
        f"foo=bar,route={SOUND},baz=1",
        f"foo=bar; Route = {SOUND} ;baz=1",
        "route=/v1/audio/%74ranscriptions",
        f"route={SOUND}/",
    ],
)
async def test_form_reaches_the_named_route(
    serve: ServeScripted, application: EchoingApplication, attributes: str
) -> None:
    """The bytes, the boundary and the query; the engine's application sees the route's path."""
    client = await serve()
    form = FormData()
    form.add_field("file", b"RIFF\x00\xff", filename="a.wav", content_type="audio/wav")
    status, body = await ask(client, attributes, form, "/invocations?a=b")
    assert (status, b"RIFF\x00\xff" in body) == (200, True)
    (call,) = application.calls
    assert (call.path, call.query_string) == (SOUND, "a=b")


async def test_every_header_of_attributes_counts(
    serve: ServeScripted, application: EchoingApplication
) -> None:
    """A proxy may add one, and a client may send the header twice."""
    client = await serve()
    headers = [(HEADER, "a=1"), (HEADER, f"route={SOUND}")]
    assert (await client.post("/invocations", data=b"{}", headers=headers)).status == 200
    assert application.calls[0].path == SOUND
    assert request_properties(CIMultiDict([(HEADER, "a=1; b=2"), (HEADER.lower(), "c=3")])) == {
        "a": "1", "b": "2", "c": "3",
    }  # fmt: skip


async def test_lanes_answer_as_on_their_own_paths(
    serve: ServeScripted,
) -> None:
    """Whole and streamed, byte by byte; the metrics are the route's."""
    client = await serve(ServingProfile(model_name="demo", tgi_compat=True))
    bodies = (
        ("/v1/chat/completions", CHAT), ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/completions", {"prompt": "x"}), ("/generate", {"inputs": "x"}),
        ("/generate_stream", {"inputs": "x"}), ("/predictions/demo", {"inputs": "x"}),
        ("/v2/models/demo/infer", {"inputs": [{"name": "text_input", "datatype": "BYTES",
                                               "shape": [1], "data": ["x"]}]}),
    )  # fmt: skip
    for path, body in bodies:
        direct = await ask(client, "", body, path)
        before = await samples(client)
        assert await ask(client, f"route={path}", body) == direct
        assert direct[0] == 200
        more = await grown(client, before)
        assert not [one for one, count in more.items() if count and "/invocations" in str(one)]


@pytest.mark.parametrize(
    ("route", "words"),
    [
        ("/adapters", "message"),
        ("/%61dapters", "message"),
        ("/models/demo/adapters/a/invoke", "message"),
        ("/adapters/invoke", "message"),
        ("/models", "message"),
        ("/sleep", "error"),
        ("/version", "error"),
        ("/metrics", "message"),
        ("/ping", "message"),
        ("/v1/models", "error"),
        ("/v1/nothing", "error"),
        ("/v1/load_lora_adapter", "error"),
        ("/console/api/state", "message"),
        ("/v1/chat/completions?x=y", "error"),
        ("//host/v1/completions", "message"),
        ("/v1/completions/\u00e9", "error"),
        ("/generate", "message"),
        ("/", "message"),
    ],
)
async def test_other_routes_are_refused_in_their_form(
    serve: ServeScripted, application: EchoingApplication, route: str, words: str
) -> None:
    """Nothing of the server is reached: no adapter is registered, and the engine does not sleep."""
    client = await serve(LORA)
    adapter = {"name": "a", "src": "/a", "preload": "false"}
    status, body = await ask(client, f"route={route}", adapter)
    assert status == 404, body
    assert words in json.loads(body)
    assert not client.app[SERVICE].registered_adapters
    assert not application.calls


async def test_adapters_and_keys_are_the_routes(serve: ServeScripted) -> None:
    """The adapter of an attribute or header beside it; a request without a key is refused."""
    client = await serve(LORA, options=WebOptions(api_keys=("secret",)))
    await register(client, "a")
    named = f"X-Amzn-SageMaker-Adapter-Identifier=a,route={MESSAGES}"
    assert request_properties({HEADER: named}) == {"x-amzn-sagemaker-adapter-identifier": "a"}
    assert (await ask(client, "route=/v1/completions", {"prompt": "x"}))[0] == 401
    assert (await ask(client, "route=/ping", {}))[0] == 404
    given = {"x-api-key": "secret"}
    for attributes in (
        "route=/v1/completions;X-Amzn-SageMaker-Adapter-Identifier=b",
        "X-Amzn-SageMaker-Adapter-Identifier=b,route=/v1/completions",
    ):
        status, body = await ask(client, attributes, {"prompt": "x"}, **given)
        assert (status, b"b" in body) == (404, True), body
        attributes = attributes.replace("=b", "=a")  # noqa: PLW2901
        assert (await ask(client, attributes, {"prompt": "x"}, **given))[0] == 200


async def test_queue_is_the_same(serve: ServeScripted, application: EchoingApplication) -> None:
    """A full server refuses before the body is read, in the route's form."""
    client = await serve(limit=1)
    with admitted(queue_of(client)):
        status, body = await ask(client, f"route={MESSAGES}", CHAT)
    assert (status, json.loads(body)["type"]) == (503, "error")
    assert not application.calls


async def test_route_is_not_known_before_the_model(serve: ServeScripted) -> None:
    """503 as for the route itself; a route of management is refused at once."""
    client = await serve(is_ready=False)
    assert (await ask(client, f"route={SOUND}", CHAT))[0] == 503
    assert (await ask(client, "route=/adapters", {}))[0] == 404


@pytest.mark.parametrize(
    ("path", "attributes"),
    [
        ("/invocations", "route=blue"),
        ("/invocations", "route=/invocations"),
        ("/invocations", "my-route=/v1/nothing"),
        ("/predictions/demo", "route=/v1/nothing"),
    ],
)
async def test_others_stay_as_they_are(serve: ServeScripted, path: str, attributes: str) -> None:
    """Only paths on /invocations count, as in AWS's image; attributes of users stay theirs."""
    client = await serve()
    assert (await ask(client, attributes, {"inputs": "x"}, path))[0] == 200
    assert request_properties({HEADER: "route=blue"}) == {"route": "blue"}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/invocations/", 200), ("/invocations/?model_name=lmi", 200), ("/predictions/lmi/", 200),
        ("/invocations//", 404), ("/invocations/?model_name=other", 404), ("/predictions/", 404),
        ("/generate/", 404), ("/v1/models/", 404),
    ],
)  # fmt: skip
async def test_lmi_s_paths_may_end_with_a_slash(
    serve: ServeScripted, path: str, status: int
) -> None:
    """LMI answers them, and vLLM redirects, which no client of SageMaker follows."""
    answer = await (await serve()).post(path, json={"inputs": "x"})
    assert answer.status == status


async def test_a_slash_keeps_the_route_and_the_probe(serve: ServeScripted) -> None:
    """`route=` counts behind it, and so does SageMaker's probe."""
    client = await serve()
    answer = await client.post("/invocations/", json=CHAT, headers={HEADER: "route=/nowhere"})
    assert (answer.status, "route=/nowhere" in await answer.text()) == (404, True)
    assert (await client.get("/ping/")).status == 200
