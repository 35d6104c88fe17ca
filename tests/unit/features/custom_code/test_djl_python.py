"""LMI's `djl_python` as handlers use it: streams, batches, adapters, sessions, arrays."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from lmi_vllm.features.custom_code.calling import CodeCaller
from lmi_vllm.features.custom_code.djl_python import (
    Input,
    Output,
    PairList,
    SessionManager,
    __version__,
)
from lmi_vllm.features.custom_code.djl_python.formatting import parse_adapters
from lmi_vllm.features.custom_code.djl_python.ndlist import from_nd_list, to_nd_list
from lmi_vllm.features.custom_code.djl_python.request import Request
from lmi_vllm.features.custom_code.djl_python.request_io import TextInput, Token
from lmi_vllm.features.custom_code.djl_python.shortcuts import decode, decode_csv, encode
from lmi_vllm.features.custom_code.djl_python.streaming import StreamingUtils
from lmi_vllm.features.custom_code.loading import load_model_code
from lmi_vllm.features.custom_code.model_code import CustomCode
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import ServingProfile
from tests.conftest import ServeScripted
from tests.support.hook_files import write_code

# Written in the manner of LMI's own test models, with the same calls of its API.
ECHO = """
    import sys, time
    from djl_python import Input, Output

    def pieces():
        for number in range(3):
            yield f"t-{number}\\n"

    def handle(inputs: Input):
        if inputs.contains_key("exception"):
            raise ValueError(inputs.get_as_string("exception"))
        if inputs.contains_key("typeerror"):
            return "no output"
        if inputs.contains_key("exit"):
            sys.exit()
        if inputs.contains_key("OOM"):
            raise MemoryError
        data, outputs = inputs.get_as_bytes(), Output()
        if kind := inputs.get_property("content-type"):
            outputs.add_property("content-type", kind)
        if inputs.is_batch():
            for place, item in enumerate(inputs.get_batches()):
                outputs.add(item.get_as_bytes(), key="data", batch_index=place)
        elif inputs.contains_key("stream"):
            outputs.add_stream_content(pieces(), None)
        else:
            outputs.add(data, key="data")
        return outputs
"""
ASYNC_ECHO = """
    import asyncio, json
    from djl_python import Input, Output
    from djl_python.encode_decode import decode

    async def rows(words, properties):
        for word in words:
            output = Output()
            for name, value in properties.items():
                output.add_property(name, value)
            output.add(Output.binary_encode({"data": word, "last": word == "end"}))
            yield output

    async def handle(inputs: Input):
        if inputs.is_empty():
            return None
        first = inputs.get_batches()[0]
        payload = decode(first, first.get_property("Content-Type"))
        words = [payload.pop("inputs"), "end"]
        if payload.pop("stream", "false").lower() == "true":
            return rows(words, first.get_properties())
        outputs = Output()
        for name, value in first.get_properties().items():
            outputs.add_property(name, value)
        if words[0] == "fail":
            return outputs.add(Output.binary_encode({"data": "", "error": "no", "code": 503}))
        return outputs.add(Output.binary_encode({"data": json.dumps(words), "last": True}))
"""
ADAPTERS = """
    from djl_python import Input, Output

    known = {}

    def register_adapter(inputs: Input):
        name = inputs.get_property("name")
        if inputs.contains_key("error"):
            raise ValueError(f"not {name}")
        if inputs.contains_key("oom"):
            raise MemoryError
        known[name] = inputs
        return Output(message=f"{name} registered")

    def unregister_adapter(inputs: Input):
        del known[inputs.get_property("name")]

    def handle(inputs: Input):
        if inputs.is_empty():
            return
        outputs = Output()
        for place, item in enumerate(inputs.get_batches()):
            out = item.get_as_string()
            if item.contains_key("adapter"):
                name = item.get_as_string("adapter")
                if name in known:
                    option = known[name].get_as_string("echooption")
                    out = name + option + out
                else:
                    out = "dyn" + name + out
            outputs.add(out, key="data", batch_index=place)
        return outputs
"""
STATEFUL = """
    import json
    from djl_python import Input, Output, SessionManager

    manager = None

    def rows(session, array):
        for number in range(array.shape[0]):
            yield json.dumps([session.get("count"), float(array[number].sum())]) + "\\n"

    def handle(inputs: Input):
        global manager
        if manager is None:
            manager = SessionManager(inputs.get_properties())
        if inputs.is_empty():
            return None
        action = inputs.get_as_json()["action"]
        name = inputs.get_property("X-Amzn-SageMaker-Session-Id")
        outputs = Output()
        if action == "create":
            session = manager.create_session()
            session.get_as_numpy("state", shape=(2, 3), create=True).fill(1)
            session.put("metadata", "test")
            outputs.add_property("X-Amzn-SageMaker-Session-Id", session.session_id)
            return outputs.add_as_json({"result": "created"})
        if action == "close":
            manager.close_session(name)
            return outputs.add_as_json({"result": "closed"})
        session = manager.get_session(name)
        if session is None:
            return outputs.error("session not found")
        session.put("count", session.get("count", 0) + 1)
        array = session.get_as_numpy("state", shape=(2, 3))
        outputs.add_property("Content-Type", "application/jsonlines")
        return outputs.add_stream_content(rows(session, array), None)
"""


def code_of(folder: Path, text: str, **properties: str) -> CustomCode:
    """Return the code of a model directory's file."""
    functions = load_model_code(write_code(folder, text), "handle", None)
    return CustomCode(functions, CodeCaller(properties=properties, timeout_seconds=20))


async def test_echo_model_runs_unchanged(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """Content by query parameters, a stream of an iterator, and every way to fail."""
    code = code_of(tmp_path, ECHO)
    await code.begin(engine)
    client = await serve(code=code)
    headers = {"Content-Type": "text/csv"}
    answer = await client.post("/invocations", data=b"a,b", headers=headers)
    assert (answer.status, await answer.read(), answer.content_type) == (200, b"a,b", "text/csv")
    answer = await client.post("/invocations?stream=1", data=b"x", headers=headers)
    assert await answer.text() == "t-0\nt-1\nt-2\n"
    for query, status, said in (
        ("exception=no", 424, "Custom handler failed: no"),
        ("typeerror=1", 424, "it returned str, expected an Output"),
        ("exit=1", 424, "the code called exit"),
        ("OOM=1", 507, "Custom handler failed: MemoryError"),
    ):
        answer = await client.post(f"/invocations?{query}", data=b"x")
        assert answer.status == status
        assert said in await answer.text()


async def test_async_echo_model_runs_unchanged(serve: ServeScripted, tmp_path: Path) -> None:
    """`binary_encode` is the answer that it stands for; copied options are no headers."""
    client = await serve(code=code_of(tmp_path, ASYNC_ECHO, hf_token="secret-value"))
    headers = {"X-Mine": "1", "Accept-Encoding": "identity"}
    answer = await client.post("/invocations", json={"inputs": "a"}, headers=headers)
    assert (answer.status, await answer.json()) == (200, ["a", "end"])
    assert answer.headers["X-Mine"] == "1"
    assert not {"hf_token", "Accept-Encoding", "Host"} & {*answer.headers}
    answer = await client.post("/invocations", json={"inputs": "a", "stream": "true"})
    assert await answer.text() == "aend"
    answer = await client.post("/invocations", json={"inputs": "fail"})
    assert (answer.status, await answer.json()) == (503, {"error": "no", "code": 503})


async def test_adapter_echo_model_runs_unchanged(serve: ServeScripted, tmp_path: Path) -> None:
    """Its functions are called as adapters come and go, with the options of the registration."""
    profile = ServingProfile(model_name="demo", enable_lora=True)
    client = await serve(profile, code=code_of(tmp_path, ADAPTERS))
    (tmp_path / "a").mkdir()
    register = f"/adapters?name=a&src={tmp_path}/a&echooption=opt"
    ask = "/invocations?adapter=a"
    assert await (await client.post(ask, data=b"in")).text() == "dynain"
    assert (await client.post(f"{register}&error=1")).status == 424
    assert (await client.post(f"{register}&oom=1")).status == 507
    assert await (await client.get("/adapters")).json() == {"adapters": []}
    assert (await client.post(register)).status == 200
    assert await (await client.post(ask, data=b"in")).text() == "aoptin"
    assert (await client.delete("/adapters/a")).status == 200
    assert await (await client.post(ask, data=b"in")).text() == "dynain"


async def test_stateful_model_runs_unchanged(serve: ServeScripted, tmp_path: Path) -> None:
    """A session keeps values and arrays between requests, until it is closed."""
    folder = tmp_path / "sessions"
    client = await serve(code=code_of(tmp_path, STATEFUL, sessions_path=str(folder)))
    answer = await client.post("/invocations", json={"action": "create"})
    assert answer.status == 200, await answer.text()
    name = answer.headers["X-Amzn-SageMaker-Session-Id"]
    headers = {"X-Amzn-SageMaker-Session-Id": name}
    for count in (1, 2):
        answer = await client.post("/invocations", json={"action": "go"}, headers=headers)
        assert await answer.text() == f"[{count}, 3.0]\n" * 2
    assert folder.stat().st_mode & 0o777 == 0o700
    answer = await client.post("/invocations", json={"action": "close"}, headers=headers)
    assert await answer.json() == {"result": "closed"}
    assert [*folder.iterdir()] == []
    answer = await client.post("/invocations", json={"action": "go"}, headers=headers)
    assert answer.status == 424


def test_sessions_are_found_again_and_expire(tmp_path: Path) -> None:
    """Another manager over the folder finds them; foreign folders stay; pickles are not read."""
    given = {"sessions_path": str(tmp_path), "sessions_expiration": "60"}
    session = SessionManager(given).create_session()
    session.put("bytes", b"\x80\x04N.")
    array = session.get_as_numpy("array", shape=(64, 64), create=True)
    kept = Path(session.files_path)
    assert (kept / "array").stat().st_blocks * 512 >= array.nbytes  # no holes, which end a server
    (kept / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):  # as on a full disk
        session.put("taken", 1)
    assert not [*kept.glob(".*.partial")]
    (tmp_path / "00000000-0000-0000-0000-000000000000").mkdir()  # one of the server's
    again = SessionManager(given)
    found = again.get_session(session.session_id)
    assert found is not None
    assert found.get("bytes") == b"\x80\x04N."
    with pytest.raises(TypeError):
        found.put("object", object())
    for bad in ("../x", "nobody"):
        with pytest.raises(ValueError, match="session not found"):
            again.get_session(bad)
    assert again.get_session("NEW_SESSION") is None
    found.expiration_ts = 1.0
    assert again.get_session(session.session_id) is None
    again.create_session()
    assert not Path(session.files_path).exists()
    assert len([*tmp_path.iterdir()]) == 2


def test_sessions_folder_of_another_is_refused(tmp_path: Path) -> None:
    """What others can write is not read."""
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"option\.sessions_path"):
        SessionManager({"sessions_path": str(tmp_path)})


ARRAYS = [
    numpy.arange(6, dtype="float32").reshape(2, 3),
    numpy.array(7, dtype=">i8"),
    numpy.array([True, False]),
    numpy.zeros((0, 2), dtype="float16"),
]


def test_nd_list_holds_arrays() -> None:
    """Sides and types come back; the first bytes are those that DJL writes."""
    encoded = to_nd_list(ARRAYS)
    assert encoded.startswith(b"\0\0\0\4\0\4NDAR\0\0\0\3\0\0\7default\0\7FLOAT32\0\0\0\2")
    for array, back in zip(ARRAYS, from_nd_list(encoded), strict=True):
        assert (back.shape, back.dtype.name) == (array.shape, array.dtype.name)
        assert (back == array).all()
    npz, npy = io.BytesIO(), io.BytesIO()
    numpy.savez(npz, ARRAYS[0])
    numpy.save(npy, ARRAYS[0])
    for file in (npz, npy):
        assert (from_nd_list(file.getvalue())[0] == ARRAYS[0]).all()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x7f\xff\xff\xff", bytes(to_nd_list(ARRAYS))[:60], b"\0\0\0\1\0\4NDAX", b"\xff" * 40],
    ids=["empty", "count", "cut", "magic", "ones"],
)
def test_broken_nd_list_is_a_value_error(content: bytes) -> None:
    """Lengths of a request are not trusted."""
    with pytest.raises(ValueError, match="NDList"):
        from_nd_list(content)


def given_input(content_type: str, data: bytes, **content: bytes) -> Input:
    """Return an Input as a handler gets it."""
    given = Input()
    given.properties["Content-Type"] = content_type
    for key, value in {**content, "data": data}.items():
        given.content.add(key, value)
    return given


def test_content_types_are_decoded_and_encoded() -> None:
    """CSV with and without headers, NDList, npz, JSON."""
    assert decode(given_input("text/csv", b"inputs\na\n"), "text/csv") == {"inputs": ["a"]}
    numbers = decode_csv(given_input("text/csv", b"1,2\n3,4\n"), require_headers=False)
    assert numbers.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(ValueError, match="numbers"):
        decode_csv(given_input("text/csv", b"a,2\n"), require_headers=False)
    for kind, named in (("tensor/ndlist", "tensor/ndlist"), ("tensor/npz", "tensor/npz")):
        output = Output()
        encode(output, [ARRAYS[0]], kind)
        assert output.get_property("Content-Type") == named
        back = decode(given_input(kind, output.content.value_at(0)), kind)["inputs"]
        assert (back[0] == ARRAYS[0]).all()
    output = Output()
    encode(output, [{"a": 1}], "text/csv")
    assert output.content.value_at(0) == b"a\r\n1\r\n"


def test_pair_list_and_output_have_lmis_calls() -> None:
    """As far as handlers use them."""
    pairs = PairList(["a"], [b"1"])
    pairs.add("c", b"3")
    pairs.add("b", b"2", index=1)
    pairs.add(pair=("d", b"4"))
    pairs.add("none")
    pairs.add_all(PairList(pair_map={"e": b"5"}))
    assert pairs.get_keys() == ["a", "b", "c", "d", "e"]
    output = Output().add("x", key="data", batch_index=0).add_stream_content(iter([["a"]]))
    assert output.streamed(["a"]) == b'{"outputs": ["a"]}\n'
    assert json.loads(str(output))["code"] == 200
    with pytest.raises(ValueError, match="one by one"):
        output.add("x", batch_index=1)
    assert bytes(Output.binary_encode({"a": "b"})) == b"\0\1\0\0\0\1a\0\0\0\1b"
    assert __version__


def test_request_writes_its_tokens() -> None:
    """LMI's own formatters by name; the text of a step is kept until it is reset."""
    for name, expected in (
        ("json", ['{"generated_text": "He', ' \\"y\\""}']),
        (
            "jsonlines",
            [
                '{"token": {"id": 1, "text": "He", "log_prob": -0.5}}\n',
                '{"token": {"id": -1, "text": " \\"y\\"", "log_prob": null}, '
                '"generated_text": "He \\"y\\""}\n',
            ],
        ),
    ):
        request = Request(TextInput(input_text="x", parameters={"output_formatter": name}))
        request.set_next_token(Token(1, "He", -0.5))
        assert [request.get_next_token(), request.get_next_token()] == expected[:1] * 2
        request.reset_next_token()
        request.set_next_token(' "y"', last_token=True, finish_reason="length")
        assert (request.get_next_token(), request.is_last_token()) == (expected[1], True)


def test_adapters_are_parsed_from_payload_content_and_header() -> None:
    """The header wins; an unknown one and another number of them are errors."""
    known: dict[str, Any] = {"a": 1, "b": 2}
    usual = {"configs": SimpleNamespace(enable_lora=True), "adapter_registry": known}
    request = TextInput(input_text=["x", "y"])
    parse_adapters(request, given_input("", b""), {"adapters": ["a", "b"]}, **usual)
    assert request.adapters == [1, 2]
    request = TextInput(input_text="x")
    parse_adapters(request, given_input("", b"", adapter=b"a"), {}, **usual)
    assert request.adapters == 1
    given = given_input("", b"", adapter=b"a")
    given.properties["X-Amzn-SageMaker-Adapter-Identifier"] = "b"
    parse_adapters(request, given, {}, **usual)
    assert request.adapters == 2
    with pytest.raises(ValueError, match="c is not registered"):
        parse_adapters(request, given_input("", b"", adapter=b"c"), {}, **usual)
    with pytest.raises(ValueError, match="Number of adapters"):
        parse_adapters(TextInput(input_text=["x", "y"]), given, {}, **usual)


def test_streaming_utils_stream_a_model_of_transformers() -> None:
    """Texts of each step, without the prompts; a failure is a text, and ends the stream."""

    class Tokens(dict[str, Any]):
        def to(self, _device: object) -> "Tokens":
            return self

    class Model:
        device = "cpu"

        def generate(self, streamer: Any, max_new_tokens: int, **_: Any) -> None:
            for row in (numpy.array([[1, 2]]), *map(numpy.array, ([3], [4]))):
                streamer.put(row)
            if max_new_tokens > 50:
                raise RuntimeError("too many")

    def tokenize(*_: Any, **__: Any) -> Tokens:
        return Tokens()

    tokenizer = type(
        "T", (), {"pad_token": "", "eos_token": "e", "__call__": staticmethod(tokenize)}
    )()
    tokenizer.decode = lambda ids, **_: "".join(map(str, ids))
    stream = StreamingUtils.get_stream_generator("Accelerate")
    assert [*stream(Model(), tokenizer, ["x"], None)] == [["3"], ["4"]]
    assert [*stream(Model(), tokenizer, ["x"], None, max_new_tokens=60)][-1] == "too many"
    whole = StreamingUtils.use_hf_default_streamer(
        Model(), tokenizer, ["x"], None, max_new_tokens=1
    )
    assert [*whole] == [["12"], ["3"], ["4"]]
    with pytest.raises(ValueError, match="not supported"):
        StreamingUtils.get_stream_generator("DeepSpeed")
