import gzip
import json
import zlib

import orjson
import pytest

from lmi_vllm.errors import Fault, LmiError, StatusTable
from lmi_vllm.features.scripted.engine import Fail, Pause, ScriptedEngine
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web.request import WebOptions
from tests.conftest import ServeScripted
from tests.web.conftest import A, queue_of, send_raw

SMALL = WebOptions(max_request_size=100)


def sized(size: int) -> bytes:
    """Return a request body of exactly that many bytes."""
    return b'{"inputs":"' + b"x" * (size - 13) + b'"}'


@pytest.mark.parametrize(("size", "status"), [(100, 200), (101, 413), (100_000, 413)])
@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
async def test_errors_body_too_large(
    serve: ServeScripted, path: str, size: int, status: int
) -> None:
    """A body above max_request_size is 413, naming the limit; one of just that size is read."""
    body = sized(size) if path == "/invocations" else sized(size).replace(b"inputs", b"prompt")
    client = await serve(options=SMALL)
    headers = {"Content-Type": "application/json"}
    response = await client.post(path, data=body, headers=headers)
    assert response.status == status
    assert status == 200 or "max_request_size (100 bytes)" in await response.text()
    assert queue_of(client).in_flight == 0


async def test_errors_unpacked_body_counts(serve: ServeScripted) -> None:
    """A compressed body is measured as what it unpacks to."""
    packed = gzip.compress(sized(50_000))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    client = await serve(options=WebOptions(max_request_size=10_000))
    assert (await client.post("/invocations", data=packed, headers=headers)).status == 413
    client = await serve()
    assert (await client.post("/invocations", data=packed, headers=headers)).status == 200


async def test_errors_body_that_does_not_unpack(serve: ServeScripted) -> None:
    """A body that is not compressed as it says is the client's fault."""
    answer = await send_raw(await serve(), b"Content-Encoding: gzip", b"garbage")
    assert answer.startswith(b"HTTP/1.1 424 ")
    assert b"Content-Encoding" in answer


CONTENT = b'{"inputs": "' + b"x" * 300_000 + b'"}'
RAW = zlib.compressobj(wbits=-15)


@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        ("gzip", gzip.compress(CONTENT)),
        ("GZIP", gzip.compress(CONTENT[:5]) + gzip.compress(CONTENT[5:])),
        ("x-gzip", gzip.compress(CONTENT)),  # old clients (RFC 9110, 8.4.1.3)
        ("deflate", zlib.compress(CONTENT)),
        ("deflate", RAW.compress(CONTENT) + RAW.flush()),
        ("identity", CONTENT),
    ],
)
async def test_errors_cut_packed_body(serve: ServeScripted, coding: str, packed: bytes) -> None:
    """All of a body is read; the first half of it is not taken for the whole."""
    client = await serve()
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    for body, status in ((packed, 200), (packed[:-1], 424), (packed[: len(packed) // 2], 424)):
        response = await client.post("/invocations", data=body, headers=headers)
        assert response.status == status, await response.text()


async def test_errors_many_packed_streams(serve: ServeScripted) -> None:
    """Each is work, however small it is."""
    packed = gzip.compress(b"{") + gzip.compress(b"") * 1001
    headers = {"Content-Encoding": "gzip"}
    response = await (await serve()).post("/invocations", data=packed, headers=headers)
    assert response.status == 424
    assert "1000 packed streams" in await response.text()


@pytest.mark.parametrize("coding", ["br", "zstd"])
async def test_errors_unsupported_coding(serve: ServeScripted, coding: str) -> None:
    """It is refused in the form of the route, with what is supported."""
    client, headers = await serve(), {"Content-Encoding": coding}
    for path, status in (("/invocations", 424), ("/v1/completions", 400)):
        response = await client.post(path, data=b"x", headers=headers)
        error = (await response.json())["error"]
        text = error if path == "/invocations" else error["message"]
        assert (response.status, "gzip and deflate" in text) == (status, True)


async def test_errors_cut_form(serve: ServeScripted) -> None:
    """Without its end the last field may be the half of one."""
    client, head = await serve(), b'--x\r\nContent-Disposition: form-data; name="data"\r\n\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    for end, status in (
        (b"\r\n--x--\r\n", 200),
        (b"\r\n--x--", 200),
        (b"\r\n--x", 424),
        (b"", 424),
    ):
        body = head + b"The river" + end
        assert (await client.post("/invocations", data=body, headers=headers)).status == status


MALFORMED = {
    "cut off": b'{"inputs": "x"',
    "empty": b"",
    "array": b"[]",
    "lone surrogate": b'{"inputs": "\\ud800"}',
    "not UTF-8": b'{"inputs": "\xff"}',
    "deep": b'{"inputs": ' + b"[" * 100_000,
    "deep parameter": b'{"inputs":"x","parameters":{"seed":' + b"[" * 900 + b"]" * 900 + b"}}",
    "infinite": b'{"inputs":"x","parameters":{"temperature":1e999}}',
    "huge integer": b'{"inputs":"x","parameters":{"seed":' + b"9" * 4000 + b"}}",
    "huge max_new_tokens": b'{"inputs":"x","parameters":{"max_new_tokens":1e300}}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_errors_malformed_body_is_clients_fault(serve: ServeScripted, body: bytes) -> None:
    """Whatever comes as JSON, the answer is a 424 that says why, and the server goes on."""
    client = await serve()
    headers = {"Content-Type": "application/json"}
    response = await client.post("/invocations", data=body, headers=headers)
    answer = await response.json()
    assert (response.status, set(answer), answer["code"]) == (424, {"error", "code"}, 424)
    assert (await client.post("/invocations", json={"inputs": "x"})).status == 200


@pytest.mark.parametrize("body", list(MALFORMED.values())[:6], ids=list(MALFORMED)[:6])
async def test_errors_malformed_body_on_openai_is_400(serve: ServeScripted, body: bytes) -> None:
    """On /v1 the same fault has OpenAI's shape and code."""
    response = await (await serve()).post("/v1/chat/completions", data=body)
    detail = (await response.json())["error"]
    assert response.status == detail["code"] == 400
    assert (detail["type"], detail["param"]) == ("BadRequestError", None)


ODD_HEADERS = {
    "adapter": (b"X-Amzn-SageMaker-Adapter-Identifier: \xff\xfe", 424),
    "content type": (b"Content-Type: image/\xff", 424),
    "model name": (b"model_name: \xff", 404),
    "boundary": (b"Content-Type: multipart/form-data; boundary=\xff", 424),
    "attribute": (b"X-Amzn-SageMaker-Custom-Attributes: model_name=\xff", 404),
    "accept": (b"Accept: \xff", 200),
    "request id": (b"X-Request-Id: \xff", 200),
}


@pytest.mark.parametrize(("headers", "status"), ODD_HEADERS.values(), ids=ODD_HEADERS)
async def test_errors_headers_that_are_no_text(
    serve: ServeScripted, headers: bytes, status: int
) -> None:
    """Bytes that are no UTF-8 in a header make a client's fault at most, never one of ours."""
    body = b"x" if b"Content-Type" in headers else b'{"inputs":"x"}'
    answer = await send_raw(await serve(), headers, body)
    head, _, document = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(document)


async def test_errors_too_many_new_tokens_names_limit(serve: ServeScripted) -> None:
    """More tokens than the context can ever hold are refused at once."""
    body = {"inputs": "x", "parameters": {"max_new_tokens": 2049}}
    response = await (await serve()).post("/invocations", json=body)
    assert response.status == 424
    assert "max_model_len (2048)" in (await response.json())["error"]


async def test_errors_too_long_prompt_leaves_server_usable(serve: ServeScripted) -> None:
    """A prompt past the context is 424, quickly, and the next request is served."""
    client = await serve()
    response = await client.post("/invocations", json={"inputs": "word " * 3000})
    assert (response.status, queue_of(client).in_flight) == (424, 0)
    assert (await client.post("/invocations", json={"inputs": "x"})).status == 200


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
async def test_errors_dead_engine_is_500(
    serve: ServeScripted, engine: ScriptedEngine, path: str
) -> None:
    """What finds the engine dead before the first byte is 500 with the fixed text."""
    client = await serve()
    engine.die()
    response = await client.post(path, json={"inputs" if "inv" in path else "prompt": "x"})
    assert response.status == 500
    assert "Inference Engine Failure" in await response.text()


async def test_errors_death_while_waiting_is_500(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """Every element of a list fails with the engine, and the request once."""
    engine.script = (Pause(0.01), Pause(60))
    client = await serve()
    engine.die()
    response = await client.post("/invocations", json={"inputs": ["x", "y"]})
    assert (response.status, queue_of(client).in_flight) == (500, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_errors_unknown_fault_shows_nothing(
    serve: ServeScripted, engine: ScriptedEngine, stream: bool
) -> None:
    """An unexpected exception is a 500 whose text says nothing of it."""
    engine.script = (Fail(RuntimeError("secret")),)  # type: ignore[arg-type]
    client = await serve()
    response = await client.post("/invocations", json={"inputs": "x", "stream": stream})
    assert response.status == 500
    assert "secret" not in await response.text()


CONFIGURED = {
    Fault.BAD_PARAMETER: ({"handler": "x"}, {"inputs": "x"}, 422),
    Fault.ENGINE: ({}, {"inputs": "x"}, 599),
    Fault.CLIENT: ({}, {}, 424),
}


@pytest.mark.parametrize(("fault", "row"), CONFIGURED.items(), ids=str)
async def test_errors_configured_codes(
    serve: ServeScripted,
    engine: ScriptedEngine,
    fault: Fault,
    row: tuple[dict[str, str], object, int],
) -> None:
    """The codes that LMI lets a user choose are used, in status and body; 424 stays."""
    headers, body, status = row
    engine.script = (Fail(LmiError("x")),)
    statuses = {Fault.BAD_PARAMETER: 422, Fault.ENGINE: 599}
    client = await serve(statuses=StatusTable(statuses))
    response = await client.post("/invocations", json=body, headers=headers)
    assert (response.status, (await response.json())["code"]) == (status, status)


async def test_errors_configured_codes_are_lmis_only(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """OpenAI's and TGI's dialects keep their own codes."""
    client = await serve(
        ServingProfile(model_name="demo", tgi_compat=True),
        statuses=StatusTable({Fault.ENGINE: 599}),
    )
    engine.die()
    for path in ("/invocations", "/v1/completions"):
        assert (await client.post(path, json={"inputs": "x"})).status == 500


@pytest.mark.parametrize(
    "body",
    [{"inputs": "x", "stream": True}, {"prompt": "x", "stream": True}],
    ids=["LMI lane", "OpenAI lane"],
)
async def test_errors_configured_code_is_in_the_last_row_of_a_stream(
    serve: ServeScripted, engine: ScriptedEngine, body: dict[str, object]
) -> None:
    """After the first byte the row says what the status line would have said."""
    engine.script = (A, Fail(LmiError("x")))
    engine.openai_error = {"error": {"message": "x", "code": 500}}
    client = await serve(statuses=StatusTable({Fault.ENGINE: 599}))
    response = await client.post("/invocations", json=body)
    rows = (await response.read()).splitlines()
    assert (response.status, orjson.loads(rows[-1])["code"]) == (200, 599)
