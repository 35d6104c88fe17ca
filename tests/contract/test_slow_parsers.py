"""vLLM's parsers of tool calls and reasoning cannot hold the event loop, whatever they read."""

import json
import re
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from starlette.datastructures import State
from vllm import envs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.tokenizers import get_tokenizer

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import Engine, HttpApplication
from lmi_vllm.engine.vllm.workarounds.parsers import SECONDS, TOO_SLOW, limit_parsers
from lmi_vllm.errors import EngineStartError, RequestError
from lmi_vllm.messages import HttpCall, ServingProfile
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from tests.contract.conftest import LoopThread

pytestmark = pytest.mark.vllm
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
REQUEST = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=[LOOK])
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "sea"}}\n</tool_call>'
BEGIN = '{"name": "f", "arguments": {'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return the demo model's tokenizer, with the tokens that the parsers look for."""
    known = get_tokenizer(str(DEMO_MODEL_DIR))
    known.add_tokens(["<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>'])
    return known


@pytest.fixture
def record() -> Iterator[RequestRecord]:
    """Enter a request."""
    entered = RequestRecord("", "", "", "", "", "")
    enter_record(entered)
    yield entered
    enter_record(None)


def limited(found: Any) -> Any:
    """Return the class of a parser as the application has it in the end."""
    chat, responses = SimpleNamespace(parser_cls=found), SimpleNamespace(parser=found)
    limit_parsers(State({"chat": chat, "responses": responses, "args": None}))
    assert chat.parser_cls.__mro__[1:] == responses.parser.__mro__[1:]
    return chat.parser_cls


def parser(tokenizer: Any, name: str) -> Any:
    """Return a parser of one answer, as a handler of the application makes it."""
    found = ParserManager.get_parser(name, enable_auto_tools=True)
    return limited(found)(tokenizer, REQUEST.tools)


class Parser:
    """As the interface that vLLM's handlers use."""

    def __init__(self) -> None:
        self.errors = 0

    def _read(self, text: str) -> str:
        """Match in a time that grows exponentially, and catch all errors, as many of vLLM's do."""
        try:
            re.fullmatch(r"(x|x)*y", text)
        except Exception:  # noqa: BLE001 - as theirs
            self.errors += 1
        return text

    def parse(self, text: str) -> str:
        """Read a whole answer; no method calls another one, so that each needs its own bound."""
        return self._read(text)

    def parse_delta(self, text: str) -> str:
        """Read a part of a stream."""
        return self._read(text)

    def count_reasoning_tokens(self, text: str) -> str:
        """Read the answer once more."""
        return self._read(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dots", f"{BEGIN}<dots_function_call>" * 5000),
        ("ernie45", f"{BEGIN}<tool_call>" * 20000),
        ("gemma4", f"{BEGIN}<|tool_call>" * 800),
        ("olmo3", "name" * 50000),
    ],
    ids=lambda value: value if len(value) < 10 else "",
)
def test_slow_parser_is_interrupted(
    tokenizer: Any, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would read for at least half a minute; a whole answer."""
    # olmo3 has a second of its own, which is over first where other processes have the core.
    monkeypatch.setitem(vars(envs), "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS", 120)
    with pytest.raises(ValueError, match="could not be read for tool calls") as raised:
        parser(tokenizer, name).parse(text, REQUEST, enable_auto_tools=True)
    assert str(raised.value) == TOO_SLOW
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("method", ["parse", "parse_delta", "count_reasoning_tokens"])
def test_parser_that_catches_every_error_is_interrupted(method: str) -> None:
    """It never ends by itself, and cannot go on with the next part of the text."""
    slow = limited(Parser)()
    with pytest.raises(ValueError, match="could not be read for tool calls"):
        getattr(slow, method)("x" * 60)
    assert slow.errors == 0


def test_choices_of_a_request_share_the_time(record: RequestRecord) -> None:
    """`n` answers cannot take `n` times as long; the next request has its own time."""
    kind = limited(Parser)
    record.parser_seconds = SECONDS * 2
    with pytest.raises(ValueError, match="could not be read for tool calls"):
        kind().parse("x")
    enter_record(RequestRecord("", "", "", "", "", ""))
    assert kind().parse("x") == "x"


def test_short_steps_of_a_stream_do_not_count(record: RequestRecord, tokenizer: Any) -> None:
    """A long tool call has thousands of them; what it is parsed into is vLLM's."""
    stream = parser(tokenizer, "hermes")
    found = [
        stream.parse_delta(part, [1], REQUEST, [1], finished=False)
        for part in re.split("( )", CALL)
    ]
    names = [call.function.name for one in found if one for call in one.tool_calls]
    assert "look" in names
    assert record.parser_seconds == 0
    calls = parser(tokenizer, "hermes").parse(CALL, REQUEST, enable_auto_tools=True)[2]
    assert [json.loads(call.arguments) for call in calls] == [{"place": "sea"}]
    assert 0 < record.parser_seconds < SECONDS


@pytest.fixture(scope="module")
def application(run: LoopThread, vllm_engine: Engine) -> HttpApplication:
    """Another application over the session's engine, with a parser of tool calls."""
    from lmi_vllm.engine.vllm.bridge import Bridge  # noqa: PLC0415 (imports vLLM)

    engine: Any = vllm_engine
    profile = ServingProfile(
        model_name="demo", enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    arguments = Namespace(**vars(engine.http.app.state.args))
    created: HttpApplication = run(Bridge.create(engine._llm, arguments, profile))
    return created


PLUGIN = """
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

@ToolParserManager.register_module("ours_from_a_file")
class OursFromAFile(Hermes2ProToolParser): ...
"""


def test_parsers_of_a_plugin_are_known(
    run: LoopThread, vllm_engine: Engine, tmp_path: Path
) -> None:
    """Of option.tool_parser_plugin; a file that cannot be imported ends the start."""
    from lmi_vllm.engine.vllm.bridge import Bridge  # noqa: PLC0415 (imports vLLM)

    engine: Any = vllm_engine
    plugin = tmp_path / "ours_from_a_file.py"
    profile = ServingProfile(
        model_name="demo", enable_auto_tool_choice=True, tool_call_parser="ours_from_a_file",
        tool_parser_plugin=str(plugin),
    )  # fmt: skip

    def created() -> Any:
        arguments = Namespace(**vars(engine.http.app.state.args))
        return run(Bridge.create(engine._llm, arguments, profile))

    with pytest.raises(EngineStartError, match="ours_from_a_file"):
        created()
    plugin.write_text(PLUGIN, encoding="utf-8")
    kind = created().app.state.openai_serving_chat.parser_cls
    assert kind.tool_parser_cls.__name__ == "OursFromAFile"


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_request_ends_with_the_error(
    run: LoopThread, application: HttpApplication, path: str, is_stream: bool
) -> None:
    """Of each API: 400, or an error in the stream.

    vLLM's converter for messages takes the event of the error for a wrong one, and says that.
    """
    body = {
        "model": "lmi",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "hello"}],
        "input": "hello",
        "stream": is_stream,
    }
    headers = [(b"Content-Type", b"application/json")]

    async def answered() -> str:
        enter_record(RequestRecord("", "", "", "", "", "", parser_seconds=SECONDS))
        call = HttpCall("POST", path, "", headers, json.dumps(body).encode(), "an-id")
        reply = await application.call(call)
        if reply.stream is None:
            assert reply.status == 400
            return reply.body.decode()
        try:
            return b"".join([chunk async for chunk in reply.stream]).decode()
        except RequestError as error:
            return str(error)

    words = '"type":"error"' if is_stream and path == "/v1/messages" else TOO_SLOW
    assert words in run(answered())
