"""Custom code around requests: what clients get, byte for byte (docs/custom-code.md)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.features.custom_code.calling import CodeCaller
from lmi_vllm.features.custom_code.djl_python import Input, Output
from lmi_vllm.features.custom_code.djl_python.request_io import TextInput
from lmi_vllm.features.custom_code.djl_python.shortcuts import (
    create_non_stream_output,
    create_stream_chunk_output,
)
from lmi_vllm.features.custom_code.functions import FileFunctions, InputFunction, OutputFunction
from lmi_vllm.features.custom_code.loading import load_model_code
from lmi_vllm.features.custom_code.model_code import CustomCode
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import ServingProfile
from tests.conftest import ServeScripted
from tests.support.hook_files import write_code

SAMPLE = Path(__file__).parents[4] / "config" / "samples" / "model.py"
PROFILE = ServingProfile(model_name="demo", predict_timeout=20)
WITH_LORA = ServingProfile(model_name="demo", enable_lora=True)


def code(
    *,
    handle: Callable[..., Any] | None = None,
    to_payload: Callable[..., Any] | None = None,
    to_answer: Callable[..., Any] | None = None,
    seconds: float = 20,
) -> CustomCode:
    """Return custom code of these functions."""
    functions = FileFunctions(
        handle,
        InputFunction.of(to_payload) if to_payload else None,
        OutputFunction.of(to_answer) if to_answer else None,
    )
    caller = CodeCaller(properties={"model_id": "acme/m"}, timeout_seconds=seconds)
    return CustomCode(functions, caller)


def fail(*_: object, **__: object) -> None:
    """Fail as user code does."""
    raise RuntimeError("no luck")


async def test_input_hook_makes_the_payload(serve: ServeScripted) -> None:
    """It may turn anything, also what is no object, into one of the known payloads."""
    client = await serve(code=code(to_payload=lambda p: {"inputs": p[0]}))
    answer = await client.post("/invocations", json=["a b"])
    assert (await answer.json())["generated_text"].startswith(" a b")


async def test_input_hook_may_read_bytes(serve: ServeScripted) -> None:
    """A content type that is no text is 424 without a hook, and the hook's to read with one."""
    audio = {"Content-Type": "audio/wav"}
    assert (await (await serve()).post("/invocations", data=b"ab", headers=audio)).status == 424
    client = await serve(code=code(to_payload=lambda p: {"inputs": p["inputs"].decode()}))
    assert (await client.post("/invocations", data=b"ab", headers=audio)).status == 200


async def test_input_hook_runs_on_openai_routes_too(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """A check that stands before the model has no way around it."""
    client = await serve(code=code(to_payload=lambda p: {**p, "checked": True}))
    await client.post("/v1/chat/completions", json={"messages": []})
    await client.post("/invocations", json={"messages": []})
    assert [call.body.get("checked") for call in engine.calls] == [True, True]


async def test_input_hook_cannot_change_the_adapter(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """Selection comes first: what the hook makes of the payload cannot cross to another tenant."""
    client = await serve(
        WITH_LORA, code=code(to_payload=lambda p: {"inputs": "x", "adapters": "b", "model": "b"})
    )
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        await client.post(f"/adapters?name={name}&src={tmp_path}/{name}")
    for body in ({"inputs": "x", "adapters": "a"}, {"inputs": "x", "model": "a"}, {"inputs": "x"}):
        assert (await client.post("/invocations", json=body)).status == 200
    used = [job.adapter.name if job.adapter else None for job in engine.jobs]
    assert used == ["a", "a", None]


@pytest.mark.parametrize("field", ["adapters", "adapter_id"])
async def test_adapter_in_parameters_is_chosen_beside_a_field_of_the_hook(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path, field: str
) -> None:
    """LMI's own example makes `inputs` of `inputPrompt`: the base model would answer for it."""
    client = await serve(WITH_LORA, code=code(to_payload=lambda p: {"inputs": p["inputPrompt"]}))
    (tmp_path / "a").mkdir()
    await client.post(f"/adapters?name=a&src={tmp_path}/a")
    body = {"inputPrompt": "x", "parameters": {field: "a"}}
    assert (await client.post("/invocations", json=body)).status == 200
    assert [job.adapter and job.adapter.name for job in engine.jobs] == ["a"]
    answer = await client.post("/invocations", json={**body, "parameters": {field: "unknown"}})
    assert answer.status == 424
    assert "The adapter unknown was not found" in await answer.text()


async def test_older_text_input_keeps_the_wish_for_a_stream(serve: ServeScripted) -> None:
    """A TextInput has no place for `stream`; LMI streamed what such a formatter read."""
    older = code(to_payload=lambda p: TextInput(input_text=p["inputs"], parameters={}))
    client = await serve(code=older)
    for wish, kind in ((True, "application/jsonlines"), (False, "application/json")):
        answer = await client.post("/invocations", json={"inputs": "x", "stream": wish})
        assert answer.content_type == kind


ANSWERS: dict[str, tuple[Callable[..., Any], bytes]] = {
    "dict": (lambda response: {"was": response["object"]}, b'{"was":"completions"}\n'),
    "text": (lambda response: "plain", b"plain\n"),
    "coroutine": (lambda response: asyncio.sleep(0, "later"), b"later\n"),
}


@pytest.mark.parametrize("style", ANSWERS)
async def test_output_hook_result_is_final(serve: ServeScripted, style: str) -> None:
    """What it returns is the body; no formatting of ours follows."""
    function, body = ANSWERS[style]
    client = await serve(code=code(to_answer=function))
    answer = await client.post("/invocations", json={"inputs": "x"})
    assert (answer.status, await answer.read()) == (200, body)
    assert answer.content_type == "application/json"


async def test_output_hook_gets_each_raw_event_of_a_stream(serve: ServeScripted) -> None:
    """One line for each event, what it leaves out is left out, an empty line at the end."""

    def to_line(event: str) -> str | None:
        return None if "[DONE]" in event else event[:6].strip() + "!"

    client = await serve(code=code(to_answer=to_line))
    answer = await client.post("/invocations", json={"inputs": "x", "stream": True})
    assert answer.content_type == "application/jsonlines"
    assert await answer.read() == b"data:!\n" * 3 + b"\n"


FAILURES = {
    "input": (code(to_payload=fail), b'{"error":"Custom formatter failed: no luck","code":424}\n'),
    "output": (code(to_answer=fail), b'{"error":"Custom formatter failed: no luck","code":424}\n'),
    "handler": (code(handle=fail), b'{"error":"Custom handler failed: no luck","code":424}\n'),
    "no-payload": (
        code(to_payload=lambda p: None),
        b'{"error":"Custom formatter failed: the input formatter returned NoneType, expected a '
        b'dict","code":424}\n',
    ),
    "no-output": (
        code(handle=lambda inputs: {"a": 1}),
        b'{"error":"Custom handler failed: it returned dict, expected an Output, an async '
        b'generator of Outputs, or None","code":424}\n',
    ),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_failing_code_is_a_424_that_says_why(serve: ServeScripted, case: str) -> None:
    """The text carries the reason; the next request is answered as before."""
    custom, body = FAILURES[case]
    client = await serve(code=custom)
    for _ in range(2):
        answer = await client.post("/invocations", json={"inputs": "x"})
        assert (answer.status, await answer.read()) == (424, body)


async def test_failing_output_hook_ends_a_stream_with_an_error_line(serve: ServeScripted) -> None:
    """The status is out by then."""
    client = await serve(code=code(to_answer=fail))
    answer = await client.post("/invocations", json={"inputs": "x", "stream": True})
    assert answer.status == 200
    assert await answer.read() == b'{"error":"Custom formatter failed: no luck","code":424}\n'


async def test_code_that_hangs_does_not_stop_the_server(serve: ServeScripted) -> None:
    """It blocks a thread of its own; predict_timeout ends the wait, /ping answers meanwhile."""
    import threading  # noqa: PLC0415

    gate = threading.Event()
    client = await serve(code=code(to_payload=lambda p: gate.wait() or p, seconds=0.2))
    asked = asyncio.create_task(client.post("/invocations", json={"inputs": "x"}))
    assert (await client.get("/ping")).status == 200
    answer = await asked
    gate.set()
    assert answer.status == 500
    assert "predict_timeout" in await answer.text()


async def test_handler_answers_or_falls_through(serve: ServeScripted) -> None:
    """An Output is the answer, with status, headers and content type; None falls through."""

    async def handle(inputs: Input) -> Output | None:
        payload = inputs.get_as_json()
        if "own" not in payload:
            return None
        output = create_non_stream_output({"got": payload["own"]}, {"X-Mine": "yes"})
        return output.set_code(201)

    client = await serve(code=code(handle=handle))
    answer = await client.post("/invocations", json={"own": "ü"})
    assert (answer.status, await answer.read()) == (201, '{"got":"ü"}\n'.encode())
    assert (answer.headers["X-Mine"], answer.content_type) == ("yes", "application/json")
    answer = await client.post("/invocations", json={"inputs": "x"})
    assert "generated_text" in await answer.json()


async def test_handler_sees_headers_options_and_query(serve: ServeScripted) -> None:
    """Properties by any case, options of the model among them; the query is content."""

    def handle(inputs: Input) -> Output:
        seen = [inputs.get_property(name) for name in ("content-type", "X-A", "model_id", "b")]
        return Output().add_as_json([*seen, inputs.get_as_string("q"), inputs.get_as_string()])

    client = await serve(code=code(handle=handle))
    headers = {"x-a": "1", "X-Amzn-SageMaker-Custom-Attributes": "b=2", "Content-Type": "text/a"}
    answer = await client.post("/invocations?q=3", data=b"body", headers=headers)
    assert await answer.json(content_type=None) == ["text/a", "1", "acme/m", "2", "3", "body"]


CUT = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx'
FILE = b'--b\r\nContent-Disposition: form-data; name="data"; filename="f"\r\n\r\n\xff\r\n'
FORM = "application/x-www-form-urlencoded"
# Body and its type -> names and values of the content after the query's.
CONTENTS: dict[str, tuple[bytes, str, list[tuple[str, str]]]] = {
    "multipart": (
        FILE + CUT + b"\r\n--b--",
        "multipart/form-data; boundary=b",
        [("data", "\xff"), ("a", "x")],
    ),
    "urlencoded": (b"data=a+b&x=%31", FORM, [("data", "a b"), ("x", "1")]),
    "JSON of curl": (b'{"a": 1}', FORM, [("data", '{"a": 1}')]),
    "bytes": (b"\xff", "application/octet-stream", [("data", "\xff")]),
}


@pytest.mark.parametrize(("body", "kind", "contents"), CONTENTS.values(), ids=CONTENTS)
async def test_handler_finds_the_fields_of_a_form(
    serve: ServeScripted, body: bytes, kind: str, contents: list[tuple[str, str]]
) -> None:
    """As in LMI: a handler that reads the field `data` gets a form's file, not its boundaries."""

    def handle(inputs: Input) -> Output:
        pairs = inputs.get_content()
        values = [value.decode("latin-1") for value in pairs.get_values()]
        return Output().add_as_json([*zip(pairs.get_keys(), values, strict=True)])

    client = await serve(code=code(handle=handle))
    answer = await client.post("/invocations?q=3", data=body, headers={"Content-Type": kind})
    assert await answer.json() == [["q", "3"], *map(list, contents)]


async def test_handler_gets_no_form_that_is_cut_off(serve: ServeScripted) -> None:
    """Half a file would be answered as if it were whole."""
    client = await serve(code=code(handle=lambda _: Output().add("never")))
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = await client.post("/invocations", data=CUT, headers=headers)
    assert answer.status == 424
    assert "cut off" in await answer.text()


@pytest.mark.parametrize(
    ("contents", "sent"),
    [
        ([(None, "a"), (None, "b")], "a"),
        ([("x", "a"), ("data", "b")], "b"),
        ([("x", "a")], "a"),
        ([], ""),
    ],
)
async def test_of_several_contents_one_is_sent(
    serve: ServeScripted, contents: list[tuple[str | None, str]], sent: str
) -> None:
    """As LMI's front end does (Input.getData); joined they would be no JSON."""

    def handle(_: Input) -> Output:
        output = Output()
        for key, value in contents:
            output.add(value, key=key)
        return output

    client = await serve(code=code(handle=handle))
    answer = await client.post("/invocations", json={"inputs": "x"})
    assert await answer.text() == sent


async def test_handler_may_stream(serve: ServeScripted) -> None:
    """An async generator of Outputs is a stream; its failure is the last line."""

    async def handle(inputs: Input) -> AsyncIterator[Output]:
        async def pieces() -> AsyncIterator[Output]:
            for number in range(3):
                yield create_stream_chunk_output({"n": number}, number == 2)
            raise RuntimeError("over")

        return pieces()

    client = await serve(code=code(handle=handle))
    answer = await client.post("/invocations", json={"inputs": "x"})
    assert answer.content_type == "application/jsonlines"
    assert (await answer.text()).splitlines() == [
        '{"n":0}',
        '{"n":1}',
        '{"n":2}',
        '{"error":"Custom handler failed: over","code":424}',
    ]


# What an Output has that no answer can have -> the part of the error that says so.
UNUSABLE: dict[str, tuple[Callable[[Output], object], str]] = {
    "a client would wait": (lambda made: made.set_code(102), "the code 102, expected 200 to 599"),
    "no status line": (lambda made: made.set_code(0), "the code 0, expected 200 to 599"),
    "above": (lambda made: made.set_code(1000), "the code 1000, expected 200 to 599"),
    "no number": (lambda made: made.set_code("abc"), "the code 'abc', expected 200 to 599"),  # type: ignore[arg-type]
    "two lines": (lambda made: made.add_property("X-A", "b\r\nX-C: d"), "the property 'X-A'"),
    "a blank": (lambda made: made.add_property("X A", "b"), "the property 'X A'"),
    "no name": (lambda made: made.add_property("", "b"), "the property ''"),
    "a type of two lines": (
        lambda made: made.add_property("content-type", "a\nb"),
        "the property 'Content-Type'",
    ),
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("spoil", "text"), UNUSABLE.values(), ids=UNUSABLE)
async def test_handler_hears_of_an_answer_that_http_cannot_carry(
    serve: ServeScripted, spoil: Callable[[Output], object], text: str, *, is_streamed: bool
) -> None:
    """The client would hang, or see the connection closed without an answer."""

    def handle(inputs: Input) -> Output:
        output = Output().add("never")
        spoil(output)
        return output.add_stream_content([1]) if is_streamed else output

    client = await serve(code=code(handle=handle))
    answer = await client.post("/invocations", json={"inputs": "x"})
    assert answer.status == 424
    assert text in (await answer.json())["error"]


async def test_items_of_a_stream_may_be_none(serve: ServeScripted) -> None:
    """The end of an iterator is no value: what follows a None is not lost."""

    def handle(inputs: Input) -> Output:
        return Output().add_stream_content([1, None, 2])

    client = await serve(code=code(handle=handle))
    answer = await client.post("/invocations", json={"inputs": "x"})
    assert await answer.text() == '{"outputs": 1}\n{"outputs": null}\n{"outputs": 2}\n'


async def test_generator_of_outputs_may_yield_nothing_else(serve: ServeScripted) -> None:
    """A None among them ended the stream as if it were complete."""

    async def handle(inputs: Input) -> AsyncIterator[Output | None]:
        async def pieces() -> AsyncIterator[Output | None]:
            yield create_stream_chunk_output("a", last_chunk=False)
            yield None

        return pieces()

    client = await serve(code=code(handle=handle))
    answer = await client.post("/invocations", json={"inputs": "x"})
    first, last = (await answer.text()).splitlines()
    assert first == "a"
    assert "it returned NoneType, expected an Output" in last


async def test_stream_is_complete_though_what_follows_it_fails(serve: ServeScripted) -> None:
    """All of it has been sent; the failure is in the log, and the connection is not cut."""

    def handle(inputs: Input) -> Output:
        return Output().add_stream_content([1, 2]).finalize(fail)

    client = await serve(code=code(handle=handle))
    answer = await client.post("/invocations", json={"inputs": "x"})
    assert await answer.text() == '{"outputs": 1}\n{"outputs": 2}\n'


OWN = """
    from djl_python.input_parser import input_formatter
    from djl_python.output_formatter import output_formatter

    @output_formatter
    def answer(response):
        return {"by": "%s"}
"""


async def test_adapter_hooks_win_over_the_base_ones_one_by_one(
    serve: ServeScripted, tmp_path: Path
) -> None:
    """The adapter's output hook, the base's input hook; the base model keeps both of its own."""
    base = code(to_payload=lambda p: {"inputs": p["ask"]}, to_answer=lambda r: {"by": "base"})
    client = await serve(WITH_LORA, code=base)
    for name in ("a", "b"):
        folder = write_code(tmp_path / name, OWN % name).parent
        assert (await client.post(f"/adapters?name={name}&src={folder}")).status == 200
    (tmp_path / "plain").mkdir()
    assert (await client.post(f"/adapters?name=plain&src={tmp_path}/plain")).status == 200
    for adapter, by in (("a", "a"), ("b", "b"), ("plain", "base"), ("", "base")):
        answer = await client.post("/invocations", json={"ask": "x", "adapters": adapter})
        assert await answer.json() == {"by": by}


async def test_list_with_several_adapters_is_formatted_by_each(
    serve: ServeScripted, tmp_path: Path
) -> None:
    """Each element goes through the hooks of its own adapter; results stay in order."""
    client = await serve(WITH_LORA, code=code())
    for name in ("a", "b"):
        await client.post(
            f"/adapters?name={name}&src={write_code(tmp_path / name, OWN % name).parent}"
        )
    body = {"inputs": ["x", "y", "z"], "adapters": ["b", "", "a"]}
    first, second, third = await (await client.post("/invocations", json=body)).json()
    assert (first, third) == ({"by": "b"}, {"by": "a"})
    assert second["generated_text"].startswith(" y")


async def test_broken_adapter_code_is_refused_before_the_weights(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """424 that names the adapter and the line; it is neither listed nor loaded."""
    client = await serve(WITH_LORA, code=code())
    folder = write_code(tmp_path / "bad", "import nowhere\n").parent
    answer = await client.post(f"/adapters?name=bad&src={folder}")
    assert answer.status == 424
    text = await answer.text()
    assert "Adapter bad: its custom code cannot be loaded" in text
    assert "line 1" in text
    assert engine.adapters == {}
    assert await (await client.get("/adapters")).json() == {"adapters": []}


async def test_running_request_keeps_the_hooks_it_began_with(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """New code under an old name is for the requests that come after it."""
    engine.seconds_per_token = 0.2
    client = await serve(WITH_LORA, code=code())
    folder = write_code(tmp_path / "a", OWN % "old").parent
    await client.post(f"/adapters?name=a&src={folder}")
    body = {"inputs": "x", "adapters": "a", "stream": True}
    running = await client.post("/invocations", json=body)
    await running.content.readany()
    write_code(tmp_path / "a", OWN % "new")
    removed = asyncio.create_task(client.delete("/adapters/a"))
    assert b"new" not in await running.content.read()
    assert (await removed).status == 200
    await client.post(f"/adapters?name=a&src={folder}")
    answer = await client.post("/invocations", json={**body, "stream": False})
    assert await answer.json() == {"by": "new"}


async def test_sample_of_a_file_does_what_it_says(serve: ServeScripted) -> None:
    """The rule stands before the prompt; both kinds of answers have the sample's own form."""
    functions = load_model_code(SAMPLE, "handle", None)
    client = await serve(code=code(to_payload=functions.input and functions.input.function))
    answer = await client.post("/invocations", json={"inputs": "a b"})
    assert "Answer in one sentence." in (await answer.json())["generated_text"]
    output, usage = functions.output, SimpleNamespace(completion_tokens=3)
    assert isinstance(output, OutputFunction)
    message = SimpleNamespace(message=SimpleNamespace(content="a"))
    for choice in (SimpleNamespace(text=" a"), message):
        made = output.function(SimpleNamespace(choices=[choice], usage=usage))
        assert made == '{"answer": "a", "tokens": 3}'
    assert output.function("data: an event") == "data: an event"
