"""vLLM's own HTTP application, called in process over the engine that serves everything else."""

import asyncio
import json
import logging
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from starlette.responses import JSONResponse
from starlette.routing import request_response

from lmi_vllm.engine.base import Engine, HttpApplication
from lmi_vllm.engine.vllm.workarounds import is_affected, request_bodies
from lmi_vllm.engine.vllm.workarounds.text_lengths import SHORT, TextLengths
from lmi_vllm.errors import Dialect, RequestError
from lmi_vllm.messages import AdapterRef, HttpCall, OpenAICall, OpenAIReply, RouteKind
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from tests.contract.conftest import LoopThread
from tests.contract.releases import since

pytestmark = pytest.mark.vllm

QUESTION = {
    "model": "lmi",
    "max_tokens": 8,
    "temperature": 0,
    "messages": [{"role": "user", "content": "hello"}],
}


@pytest.fixture
def application(vllm_engine: Engine) -> HttpApplication:
    """The application over the session's engine."""
    assert vllm_engine.http is not None
    return vllm_engine.http


def http_call(path: str, body: object = None, method: str = "POST", **more: Any) -> HttpCall:
    """Return a call with a JSON body, or with bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = [(b"Content-Type", b"application/json"), (b"Origin", b"http://elsewhere.example")]
    return HttpCall(method, path, "", headers, content, "an-id", **more)


async def whole(reply: OpenAIReply) -> bytes:
    """Return all bytes of an answer."""
    if reply.stream is None:
        return reply.body
    return b"".join([chunk async for chunk in reply.stream])


def test_routes_have_their_effect_and_their_error_format(application: HttpApplication) -> None:
    """All of it is read from the application: no list of ours."""
    found = {route.path: (route.kind, route.dialect) for route in application.routes}
    assert found["/v1/messages"] == (RouteKind.INFERENCE, Dialect.ANTHROPIC)
    assert found["/v1/chat/completions/batch"] == (RouteKind.INFERENCE, Dialect.OPENAI)
    assert found["/tokenize"][0] is RouteKind.INFERENCE
    assert found["/version"][0] is RouteKind.INFORMATION
    assert found["/scale_elastic_ep"][0] is RouteKind.MANAGEMENT
    if not is_affected("vllm", "0.32"):  # 0.31 has it with --enable-scale-out
        assert found["/inference/v1/abort_requests"][0] is RouteKind.MANAGEMENT
    assert not {"/ping", "/invocations", "/metrics", "/docs", "/v1/load_lora_adapter"} & set(found)


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("POST", "/v1/messages", "/v1/messages"),
        ("DELETE", "/v1/messages", "/v1/messages"),
        ("GET", "/v1/responses/an-id", "/v1/responses/{response_id}"),
        ("POST", "/v1/nothing", None),
        ("GET", "/metrics", None),
    ],
)
def test_path_means_a_route(
    application: HttpApplication, method: str, path: str, found: str | None
) -> None:
    """Also with another method than its own, which the answer then names."""
    route = application.find(method, path)
    assert (None if route is None else route.path) == found


@pytest.mark.parametrize(
    ("path", "needs"),
    [
        ("/tokenize", False), ("/detokenize", False), ("/v1/messages/count_tokens", False),
        ("/v1/chat/completions/render", False), ("/v1/completions/render", False),
        ("/v1/messages", True), ("/v1/embeddings", True),
    ],
)  # fmt: skip
def test_routes_that_split_prompts_need_no_engine(
    application: HttpApplication, path: str, needs: bool
) -> None:
    """They answer while it sleeps; one that this application lacks is no route."""
    route = application.find("POST", path)
    assert route is None or route.needs_engine is needs


def test_whole_answer_is_vllm_s(run: LoopThread, application: HttpApplication) -> None:
    """The id is that of the request; no header of vLLM's CORS is in it."""
    reply = run(application.call(http_call("/v1/messages", QUESTION)))
    answer = json.loads(reply.body)
    assert (reply.status, reply.content_type) == (200, "application/json")
    assert answer["content"][0]["text"].startswith("Hello!")
    assert answer["id"].endswith("an-id")
    assert not {"vary", "access-control-allow-origin", "content-length"} & set(reply.headers)


@pytest.mark.parametrize(
    ("settings", "sees"),
    [({}, False), ({"middleware": ["a.b"]}, True), ({"enable_server_load_tracking": True}, True)],
    ids=["neither", "middleware", "load"],
)
def test_application_sees_every_request_that_it_is_to_see(
    settings: dict[str, Any], sees: bool
) -> None:
    """`/load` counts what it answers: past it nothing would be counted."""
    pytest.importorskip("vllm")
    from lmi_vllm.engine.vllm.bridge import Bridge  # noqa: PLC0415 (imports vLLM)

    args = Namespace(**{"middleware": [], "enable_server_load_tracking": False} | settings)
    app: Any = SimpleNamespace(state=SimpleNamespace(args=args))
    assert Bridge(app, None).sees_every_request is sees  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/messages/", "/v1/models/", "/version/"])
def test_slash_too_many_is_redirected(
    run: LoopThread, application: HttpApplication, path: str
) -> None:
    """To a relative address; without a slot of the queue, since no method of it is answered."""
    route = application.find("POST", path)
    assert route is not None
    assert route.methods == frozenset()
    reply = run(application.call(http_call(path, QUESTION)))
    assert (reply.status, reply.headers["location"]) == (307, path.rstrip("/"))


@pytest.mark.parametrize("kind", ["completions", "chat/completions", "chat/completions/batch"])
@pytest.mark.parametrize("body", [{}, {"request_id": "mine"}])
def test_id_of_the_body_is_the_answer_s(
    run: LoopThread, vllm_engine: Engine, kind: str, body: dict[str, str]
) -> None:
    """Of the two lanes' answers, too; without one it is the request's own."""
    asked: dict[str, Any] = {**QUESTION, "prompt": "x", **body}
    if kind.endswith("batch"):
        asked["messages"] = [asked["messages"]]
    reply = run(vllm_engine.answer_openai(OpenAICall(kind, asked, {}, "an-id")))
    assert json.loads(reply.body)["id"].endswith("-mine" if body else "-an-id")


@pytest.mark.parametrize("wrong", [1, {"x": 1}, {"role": "nobody", "content": "x"}])
def test_conversation_is_read_up_to_its_first_wrong_items(
    run: LoopThread, application: HttpApplication, wrong: object
) -> None:
    """Without it vLLM collects some sixty errors for each item, on the event loop."""
    items = [{"role": "user", "content": "x"}] * 70
    asked = {"model": "lmi", "input": [*items, *[wrong] * 2000], "max_output_tokens": 2}
    with pytest.raises(RequestError, match=r"^input: one of the items 65 to 128 is none of the"):
        run(application.call(http_call("/v1/responses", asked)))
    reply = run(application.call(http_call("/v1/responses", {**asked, "input": items})))
    assert reply.status == 200


TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
FORCED: dict[str, tuple[Any, str]] = {
    "required": ("required", '"required"'),
    "by name": ({"type": "function", "name": "look"}, 'function "look"'),
    "one of some": (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function"}]},
        '"required"',
    ),
}
ASKED = {"model": "lmi", "input": "x", "tools": [TOOL], "max_output_tokens": 2}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("choice", "shown"), FORCED.values(), ids=FORCED)
def test_response_with_a_forced_call_needs_a_parser(
    run: LoopThread, application: HttpApplication, choice: Any, shown: str, is_stream: bool
) -> None:
    """It is refused in the words of chats; a response that only may have a call is answered."""
    asked = {**ASKED, "tool_choice": choice, "stream": is_stream}
    with pytest.raises(RequestError) as refused:
        run(application.call(http_call("/v1/responses", asked)))
    assert str(refused.value) == f"tool_choice={shown} requires --tool-call-parser to be set"
    free = {**ASKED, "tool_choice": "auto"}
    assert run(application.call(http_call("/v1/responses", free))).status == 200


def test_plain_vllm_answers_a_forced_call_with_text(
    run: LoopThread, application: HttpApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`request_bodies.py`: without our check."""
    monkeypatch.setattr(request_bodies, "_reads_calls", lambda _: True)
    asked = {**ASKED, "tool_choice": "required"}
    reply = run(application.call(http_call("/v1/responses", asked)))
    assert reply.status == 200
    assert [item["type"] for item in json.loads(reply.body)["output"]] == ["message"]


REPEATED: dict[str, Any] = {
    "text": {"format": {"type": "text"}, "more": "x" * (1 << 20)},
    "reasoning": {"more": ["x"] * (1 << 18)},
    "user": "x" * (1 << 20),
    "metadata": {"x": "x" * (1 << 20)},
}


@pytest.mark.parametrize("name", REPEATED)
def test_response_repeats_no_field_of_any_size(
    run: LoopThread, application: HttpApplication, name: str
) -> None:
    """What it repeats and no prompt has is bounded; a usual one is there."""
    asked = {"model": "lmi", "input": "x", "max_output_tokens": 2}
    with pytest.raises(RequestError, match=f"^{name} is repeated in the answer"):
        run(application.call(http_call("/v1/responses", {**asked, name: REPEATED[name]})))
    usual = {**asked, "user": "me", "metadata": {"a": "b"}}
    reply = json.loads(run(application.call(http_call("/v1/responses", usual))).body)
    assert (reply["user"], reply["metadata"]) == ("me", {"a": "b"})


def test_plain_vllm_repeats_a_field_of_any_size(
    run: LoopThread, application: HttpApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`request_bodies.py`: without our check."""
    monkeypatch.setattr(request_bodies, "_ECHOED", ())
    asked = {"model": "lmi", "input": "x", "max_output_tokens": 2, "text": REPEATED["text"]}
    reply = run(application.call(http_call("/v1/responses", asked)))
    assert len(reply.body) > 1 << 20


def test_schema_of_tgi_s_form_is_not_dropped_in_a_batch(
    run: LoopThread, application: HttpApplication
) -> None:
    """The other routes read it."""
    asked = {"model": "lmi", "messages": [[{"role": "user", "content": "x"}]]}
    wanted = {"type": "json_object", "value": {"type": "boolean"}}
    with pytest.raises(RequestError, match=r"^response_format\.value is not read here"):
        run(
            application.call(
                http_call("/v1/chat/completions/batch", {**asked, "response_format": wanted})
            )
        )


def test_background_response_keeps_its_request_slot(
    run: LoopThread,
    application: HttpApplication,
    vllm_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it has begun, streamed or not: it is in the engine until that task ends."""
    responses = application.app.state.openai_serving_responses  # type: ignore[attr-defined]
    monkeypatch.setattr(responses, "enable_store", True)

    async def kept(body: dict[str, Any]) -> list[object]:
        tasks: list[asyncio.Task[Any]] = []
        record = RequestRecord("an-id", "POST", "/v1/responses", "/v1/responses", "-", "openai")
        record.keep = tasks.append
        enter_record(record)
        asked = {"model": "lmi", "input": "x", "max_output_tokens": 8, "background": True, **body}
        reply = await application.call(http_call("/v1/responses", asked))
        (task,) = tasks
        await task
        await whole(reply)
        return [reply.status, len(record.sequences), vllm_engine.running_requests]

    assert [run(kept({})), run(kept({"stream": True}))] == [[200, 1, 0]] * 2


def test_request_that_a_lane_cannot_read_is_refused_by_the_application(
    run: LoopThread, vllm_engine: Engine
) -> None:
    """FastAPI reads from attributes, too, and says so."""
    body = {"prompt": "x", "stream": True, "stream_options": 1}
    call = OpenAICall("completions", body, {}, "an-id")
    reply = run(vllm_engine.answer_openai(call))
    assert reply.status == 400
    assert b"or object to extract fields from" in reply.body


def test_stream_has_the_text_of_the_whole_answer(
    run: LoopThread, application: HttpApplication
) -> None:
    """An event at a time, as vLLM frames them."""
    answer = json.loads(run(application.call(http_call("/v1/messages", QUESTION))).body)

    async def streamed() -> bytes:
        call = http_call("/v1/messages", {**QUESTION, "stream": True})
        return await whole(await application.call(call))

    lines = run(streamed()).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    text = "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
    assert text == answer["content"][0]["text"]
    assert events[-1]["type"] == "message_stop"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/messages", b"{", 400, "JSON decode error"),
        ("/v1/messages", {**QUESTION, "model": "other"}, 404, "`other` does not exist"),
        ("/v1/chat/completions/batch", {"model": "lmi"}, 400, "messages"),
        pytest.param(
            "/inference/v1/generate",
            {"token_ids": [1]},
            403,
            "--enable-scale-out",
            marks=since("0.32", "0.31 has no such route without that option"),
        ),
    ],
)
def test_refusal_is_an_answer(
    run: LoopThread,
    application: HttpApplication,
    path: str,
    body: object,
    status: int,
    words: str,
) -> None:
    """In vLLM's words; nothing is raised."""
    reply = run(application.call(http_call(path, body)))
    assert (reply.status, words in reply.body.decode()) == (status, True)


def test_adapter_of_the_call_answers(
    run: LoopThread, application: HttpApplication, vllm_engine: Engine, adapter_folder: Any
) -> None:
    """Whatever `model` says; the answer carries the adapter's own name, and a client cannot."""
    adapter = AdapterRef("shouts", adapter_folder("capitals"), 9_001)

    async def asked() -> tuple[Any, OpenAIReply]:
        await vllm_engine.load_adapter(adapter)
        try:
            call = http_call("/v1/messages", QUESTION, adapter=adapter)
            named = http_call("/v1/messages", {**QUESTION, "model": "shouts"})
            return json.loads((await application.call(call)).body), await application.call(named)
        finally:
            await vllm_engine.unload_adapter(adapter)

    answer, by_name = run(asked())
    assert answer["model"] == "shouts"
    assert answer["content"][0]["text"].isupper()
    assert by_name.status == 404


def test_no_answer_shows_the_internal_adapter_name(
    run: LoopThread, application: HttpApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route that says what `model` was says the adapter's own name."""

    async def echo(request: Any) -> JSONResponse:
        return JSONResponse(await request.json())

    app = application.app  # type: ignore[attr-defined]
    (route,) = [one for one in app.routes if getattr(one, "path", "") == "/version"]
    monkeypatch.setattr(route, "app", request_response(echo))
    adapter = AdapterRef('a "b" é', "/a", 9_003)
    reply = run(application.call(http_call("/version", {"model": "x"}, "GET", adapter=adapter)))
    assert json.loads(reply.body) == {"model": 'a "b" é'}


def test_base_model_answers_in_place_of_model(
    run: LoopThread, application: HttpApplication
) -> None:
    """A request that chose the base model may have an adapter's name as `model`."""
    body = {**QUESTION, "model": "an-adapter"}
    assert run(application.call(http_call("/v1/messages", body))).status == 404
    name = QUESTION["model"]
    assert run(application.call(http_call("/v1/messages", body, model=name))).status == 200


@pytest.mark.parametrize("body", [b"{", b"[1]", b"--x\r\n", b"\xff"])
def test_adapter_answers_no_other_body_than_an_object(
    run: LoopThread, application: HttpApplication, body: bytes
) -> None:
    """As it came it would be the base model's; a failure of ours would be a 500."""
    call = http_call("/v1/messages", body, adapter=AdapterRef("a", "/a", 9_002))
    with pytest.raises(RequestError, match="JSON objects and forms only"):
        run(application.call(call))


def test_adapter_answers_a_form(run: LoopThread, application: HttpApplication) -> None:
    """Its `model` is put in place: this route still refuses the form, with vLLM's text."""
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--x--\r\n'
    headers = [(b"Content-Type", b"multipart/form-data; boundary=x")]
    adapter = AdapterRef("a", "/a", 9_002)
    call = HttpCall("POST", "/v1/messages", "", headers, form, "an-id", adapter)
    reply = run(application.call(call))
    assert (reply.status, b"Unsupported Media Type" in reply.body) == (400, True)


def test_client_disconnect_aborts_the_bridged_request(
    run: LoopThread, application: HttpApplication, vllm_engine: Engine
) -> None:
    """In a stream that was read, in one that was not, and before the answer."""

    async def left(chunks: int) -> int:
        call = http_call("/v1/messages", {**QUESTION, "max_tokens": 1000, "stream": True})
        reply = await application.call(call)
        assert reply.stream is not None
        for _ in range(chunks):
            await anext(reply.stream)
        await reply.stream.aclose()  # type: ignore[attr-defined]
        return vllm_engine.running_requests

    async def given_up() -> int:
        call = http_call("/v1/messages", {**QUESTION, "max_tokens": 1000})
        task = asyncio.create_task(application.call(call))
        while not vllm_engine.running_requests:  # noqa: ASYNC110 - nothing tells when it begins
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        return vllm_engine.running_requests

    assert [run(left(0)), run(left(5)), run(given_up())] == [0, 0, 0]


def test_slow_reader_holds_the_handler_back(run: LoopThread, application: HttpApplication) -> None:
    """One chunk waits for its reader; the rest is vLLM's to join."""

    async def chunks() -> int:
        call = http_call("/v1/messages", {**QUESTION, "max_tokens": 60, "stream": True})
        reply = await application.call(call)
        await asyncio.sleep(1.5)
        assert reply.stream is not None
        return len([chunk async for chunk in reply.stream])

    assert run(chunks()) < 30


def test_log_is_as_it_was(vllm_engine: Engine) -> None:
    """SageMaker's library for vLLM's own `/invocations` sets the root logger's level to ERROR."""
    assert vllm_engine.http is not None
    assert logging.getLogger().level <= logging.WARNING


BOOTSTRAP = """
import sys
from fastapi import FastAPI
from vllm.entrypoints.serve.sagemaker.api_router import sagemaker_standards_bootstrap
from lmi_vllm.engine.vllm.workarounds import Scope, apply
if sys.argv[1] == "ours":
    apply(Scope.APPLICATION)
sagemaker_standards_bootstrap(FastAPI())
"""


@pytest.mark.parametrize(("who", "runs"), [("vLLM", True), ("ours", False)])
def test_script_of_the_model_is_not_vllm_s_to_run(tmp_path: Path, who: str, runs: bool) -> None:
    """SageMaker's library would import it, whatever `LMI_CUSTOM_CODE` says."""
    pytest.importorskip("vllm")
    mark = tmp_path / "it ran"
    (tmp_path / "model.py").write_text(f"open({str(mark)!r}, 'w').close()", encoding="utf-8")
    environ = {**os.environ, "SAGEMAKER_MODEL_PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", BOOTSTRAP, who], env=environ, check=True, timeout=120)
    assert mark.exists() is runs


def test_application_has_no_route_of_sagemaker_s_library(application: HttpApplication) -> None:
    """It was made without the library's part, which loads adapters by path."""
    paths = {route.path for route in application.app.routes}  # type: ignore[attr-defined]
    assert "/v1/messages" in paths
    assert not {"/adapters", "/adapters/{adapter_name}"} & paths


def test_streamed_batch_of_chats_is_400(run: LoopThread, application: HttpApplication) -> None:
    """VLLM would answer with the end of each chat: 200, and mostly one word of it."""
    path, chats = "/v1/chat/completions/batch", {"messages": [QUESTION["messages"]] * 2}
    whole = run(application.call(http_call(path, {**QUESTION, **chats, "stream": False})))
    assert whole.status == 200
    with pytest.raises(RequestError, match="stream: a batch of chats is not streamed"):
        run(application.call(http_call(path, {**QUESTION, **chats, "stream": True})))


# vLLM's validators take an object for granted there.
UNREADABLE: dict[str, tuple[str, object]] = {
    "a number for an object": ("/v1/chat/completions", {**QUESTION, "structured_outputs": 0.5}),
    "beside a number that only Python's parser keeps": (
        "/v1/chat/completions",
        {**QUESTION, "structured_outputs": 0.5, "seed": 2**63},
    ),
    "completions": ("/v1/completions", {"prompt": "x", "structured_outputs": 0.5}),
}


@pytest.mark.parametrize(("path", "body"), UNREADABLE.values(), ids=UNREADABLE)
def test_body_that_crashes_a_validator_is_400(
    run: LoopThread, vllm_engine: Engine, application: HttpApplication, path: str, body: Any
) -> None:
    """400 with the reason, by the lane and by the application."""
    direct = OpenAICall(path.removeprefix("/v1/"), body, {}, "an-id")
    for reply in (
        run(application.call(http_call(path, body))),
        run(vllm_engine.answer_openai(direct)),
    ):
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"], error["type"]) == (400, 400, "BadRequestError")
        assert error["message"].startswith("the request cannot be read: 'float' object")


def test_release_has_the_names_that_short_prompts_need(
    run: LoopThread, vllm_engine: Engine, application: HttpApplication
) -> None:
    """Else they all go to vLLM's thread again; the tokens are the same on both ways."""
    renderer = vllm_engine._llm.renderer  # type: ignore[attr-defined]
    here = renderer.tokenize_prompt_async
    assert isinstance(here, TextLengths)

    async def takes() -> bool:
        return bool(here.takes({"prompt": "a b c"}))

    assert run(takes())

    def tokens() -> object:
        return json.loads(run(application.call(http_call("/tokenize", {"prompt": "a b c"}))).body)

    found = tokens()
    renderer.tokenize_prompt_async = here._in_thread
    try:
        assert tokens() == found
    finally:
        renderer.tokenize_prompt_async = here


TEXTS: Final = (
    "", " ", "Once upon a time", "<s>[x]</s> <|user|>\n", "\u00e4\u20ac\U0001f600 ", "a" * SHORT,
)  # fmt: skip


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("most", [None, 3, 2000], ids=["any length", "cut", "long"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_short_prompt_has_the_ids_that_vllm_makes(
    vllm_engine: Engine, text: str, most: int | None, *, special: bool
) -> None:
    """By the tokenizers library alone, but where it would have to cut them."""
    renderer = vllm_engine._llm.renderer  # type: ignore[attr-defined]
    params = replace(
        renderer.default_cmpl_tok_params,
        add_special_tokens=special,
        truncate_prompt_tokens=most,
        truncation_side=None,
    )
    found = renderer.tokenize_prompt_async.tokenized({"prompt": text}, params)
    expected = renderer.tokenize_prompt({"prompt": text}, params)
    if len(expected["prompt_token_ids"]) == most:
        assert "prompt_token_ids" not in found or len(found["prompt_token_ids"]) == most
    else:
        assert found["prompt_token_ids"] == expected["prompt_token_ids"]
    assert renderer.tokenize_prompt(found, params) == expected


@pytest.mark.parametrize("read", [{"prompt_token_ids": [5]}, {"prompt_embeds": [0.5]}])
def test_prompt_that_is_read_stays_as_it_is(vllm_engine: Engine, read: dict[str, Any]) -> None:
    """Also where its text is there, too."""
    renderer = vllm_engine._llm.renderer  # type: ignore[attr-defined]
    given = {"prompt": "Once", **read}
    params = renderer.default_cmpl_tok_params
    assert renderer.tokenize_prompt_async.tokenized(dict(given), params) == given


def test_fault_after_reading_is_the_server_s(
    run: LoopThread,
    vllm_engine: Engine,
    application: HttpApplication,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same kind of error out of a handler stays 500."""

    async def fails(*_: object) -> None:
        raise AttributeError("a fault of the handler")

    state = vllm_engine.http.app.state  # type: ignore[union-attr]
    monkeypatch.setattr(state.openai_serving_completion, "create_completion", fails)
    reply = run(application.call(http_call("/v1/completions", {"prompt": "x"})))
    assert reply.status == 500
