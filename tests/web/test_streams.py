import aiohttp
import pytest

from lmi_vllm.errors import LmiError
from lmi_vllm.features.scripted.engine import Fail, Pause, ScriptedEngine
from lmi_vllm.messages import ServingProfile
from tests.conftest import ServeScripted
from tests.web.conftest import ROW_A, STREAM, A, B, queue_of

SILENCE = Pause(60)


def profile(**limits: float) -> ServingProfile:
    """Return a profile with those limits, in seconds."""
    return ServingProfile(model_name="demo", **limits)


async def test_streams_row_comes_before_next_token(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """A row is on the wire while the engine still works on the next token."""
    engine.script = (A, SILENCE, B)
    response = await (await serve()).post("/invocations", json=STREAM)
    assert await response.content.readany() == ROW_A
    assert engine.running_requests == 1


WHOLE_LIMITS = {
    "answer": {"inputs": "x"},
    "list": {"inputs": ["x", "y"]},
    "stream, before the first token": STREAM,
}


@pytest.mark.parametrize("body", WHOLE_LIMITS.values(), ids=WHOLE_LIMITS)
async def test_streams_predict_timeout_is_500_naming_it(
    serve: ServeScripted, engine: ScriptedEngine, body: object
) -> None:
    """With nothing sent yet an expired limit is an error answer, and the request is aborted."""
    engine.script = (SILENCE, A)
    client = await serve(profile(predict_timeout=0.05))
    response = await client.post("/invocations", json=body)
    answer = await response.json()
    assert (response.status, answer["code"], answer["type"]) == (500, 500, "TimeoutException")
    assert answer["message"] == "no answer within 0.05 s (predict_timeout)"
    assert (engine.running_requests, queue_of(client).in_flight) == (0, 0)


CHUNK_LIMITS = {
    "chunked_read_timeout": profile(predict_timeout=5, chunked_read_timeout=0.05),
    "predict_timeout": profile(predict_timeout=0.05, chunked_read_timeout=5),
}


@pytest.mark.parametrize(("name", "limits"), CHUNK_LIMITS.items(), ids=CHUNK_LIMITS)
async def test_streams_silence_ends_with_error_row(
    serve: ServeScripted, engine: ScriptedEngine, name: str, limits: ServingProfile
) -> None:
    """The smaller limit without a new token ends a stream with a last row that names it."""
    engine.script = (A, SILENCE, B)
    client = await serve(limits)
    response = await client.post("/invocations", json=STREAM)
    last = f'{{"error":"no answer within 0.05 s ({name})","code":500}}\n'
    assert await response.read() == ROW_A + last.encode()
    assert (engine.running_requests, queue_of(client).in_flight) == (0, 0)


async def test_streams_chunk_timeout_does_not_bound_whole_answers(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """A whole answer may take longer than the limit between two chunks."""
    engine.script = (Pause(0.1), B)
    client = await serve(profile(chunked_read_timeout=0.01))
    assert (await client.post("/invocations", json={"inputs": "x"})).status == 200


async def test_streams_openai_silence_ends_with_error_event_and_done(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """On /v1 a stream that falls silent ends as OpenAI's clients expect."""
    engine.seconds_per_token = 60
    client = await serve(profile(predict_timeout=0.05))
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert await response.read() == (
        b'data: {"error":{"message":"no answer within 0.05 s (predict_timeout)",'
        b'"type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'
    )
    assert engine.running_requests == 0


async def test_streams_engine_death_ends_with_error_row(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """An engine that dies in mid-stream leaves a last row, and the stream ends normally."""
    engine.script = (A, SILENCE, B)
    client = await serve()
    response = await client.post("/invocations", json=STREAM)
    assert await response.content.readany() == ROW_A
    engine.die()
    assert await response.read() == b'{"error":"Inference Engine Failure","code":500}\n'
    assert queue_of(client).in_flight == 0


async def test_streams_unknown_fault_cuts_the_stream(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """After the first byte an unforeseen exception cuts the connection, for all to see."""
    engine.script = (A, Fail(RuntimeError("secret")))  # type: ignore[arg-type]
    client = await serve()
    response = await client.post("/invocations", json=STREAM)
    assert await response.content.readany() == ROW_A
    with pytest.raises(aiohttp.ClientError):
        await response.read()
    assert (engine.running_requests, queue_of(client).in_flight) == (0, 0)


async def test_streams_failure_before_first_byte_has_its_status(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """The status line waits for the first token: a stream that never began is an error answer."""
    engine.script = (Fail(LmiError("x")),)
    response = await (await serve()).post("/invocations", json=STREAM)
    assert (response.status, response.content_type) == (500, "application/json")
