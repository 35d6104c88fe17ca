"""A model.py of LMI's, and adapters with their own, run unchanged on the real engine.

Also what a broken one does to a start, and that nothing is ever written into the model's folder.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import RunningServer, StartServer, running_server
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.hook_files import FORMATTERS, PROMPTS, write_code

ADAPTER = """
    from djl_python.output_formatter import output_formatter
    import prompts

    @output_formatter
    def answer(response):
        return {"by": prompts.WHO, "answer": response.choices[0].text}
"""
# Of LMI's rolling batch: called for each token, with the values of its documents.
BY_TOKEN = """
    import json
    from djl_python.output_formatter import TextGenerationOutput, output_formatter

    @output_formatter
    def rows(request_output: TextGenerationOutput) -> str:
        best = request_output.sequences[request_output.best_sequence_index]
        token, is_first, is_last = best.get_next_token()
        row = {**token.as_dict(), "first": is_first}
        return json.dumps({**row, "reason": best.finish_reason} if is_last else row) + "\\n"
"""
RIVER = {"ask": "The river runs"}


def copy_model(folder: Path) -> Path:
    """Return a copy of the embedded model."""
    return Path(shutil.copytree(DEMO_MODEL_DIR, folder / "model"))


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model with hooks of its own and of one adapter, in a read-only folder."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    model = copy_model(tmp_path_factory.mktemp("hooks"))
    write_code(model, FORMATTERS)
    write_code(model, PROMPTS, "prompts.py")
    write_code(model / "adapters" / "json", ADAPTER)
    write_code(model / "adapters" / "json", "WHO = 'json'\n", "prompts.py")
    by_token = model / "adapters" / "capitals_by_token"
    shutil.copytree(model / "adapters" / "capitals", by_token)
    write_code(by_token, BY_TOKEN)
    before = sorted(model.rglob("*"))
    with running_server(model.parent, "-s", str(model)) as server:
        yield server
        assert sorted(model.rglob("*")) == before


def test_hooks_get_the_payload_and_the_raw_response(hooked: RunningServer) -> None:
    """The client's own shape in, vLLM's object to the hook, the hook's body out."""
    answer = call(hooked.url, "/invocations", {"ask": "The capital of France is"})
    assert answer.body == b'{"base":true,"answer":[" Paris. The"]}\n'


def test_hooks_of_all_payload_families(hooked: RunningServer) -> None:
    """Completions, chat, and a list of prompts, which is one response with several choices."""
    text = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
    assert call(hooked.url, "/invocations", text).json()["answer"] == [" Paris"]
    asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    answer = call(hooked.url, "/v1/chat/completions", {**asked, "temperature": 0})
    assert answer.json() == {"base": True, "answer": ["The capital of France is Paris."]}
    answer = call(hooked.url, "/invocations", {"ask": ["The moon is", "The river runs"]})
    assert answer.json()["answer"] == [" a ball of grey", " from the mountains to the"]


def test_hooks_of_a_stream_get_every_raw_event(hooked: RunningServer) -> None:
    """VLLM's events pass through a hook that returns them, and an empty line ends the stream."""
    answer = call(hooked.url, "/invocations", {**RIVER, "stream": True})
    assert answer.headers["content-type"] == "application/jsonlines"
    events = [line for line in answer.body.split(b"\n") if line]
    assert all(event.startswith(b"data: {") for event in events[:-1])
    assert events[-1] == b"data: [DONE]"
    assert answer.body.endswith(b"data: [DONE]\n\n\n\n")


def test_hooks_of_an_adapter_come_first_and_stay_apart(hooked: RunningServer) -> None:
    """The json adapter has an output hook and a helper of the same name as the base's."""
    by_json = {"by": "json", "answer": ' {"answer": "The'}
    answers = {
        name: call(hooked.url, "/invocations", {**RIVER, "adapters": name}).json()
        for name in ("json", "capitals", "")
    }
    assert answers["json"]["by"] == "json"
    assert answers["json"]["answer"].startswith(by_json["answer"][:4])
    assert answers["capitals"]["base"] is True
    assert answers["capitals"]["answer"][0].isupper()
    assert answers[""] == {"base": True, "answer": [" from the mountains to the"]}
    mixed = {"inputs": ["The river runs"] * 2, "adapters": ["json", ""]}
    first, second = call(hooked.url, "/invocations", mixed).json()
    assert (first["by"], second["base"]) == ("json", True)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_older_formatter_is_called_for_each_token(
    hooked: RunningServer, demo_server: RunningServer, stream: bool
) -> None:
    """Ids, texts, probabilities and the end are those of the server's own rows."""
    asked = {"inputs": "The moon is", "parameters": {"max_new_tokens": 6, "details": True}}
    plain = call(demo_server.url, "/invocations", {**asked, "adapters": "capitals"}).json()
    body = {**asked, "adapters": "capitals_by_token", "stream": stream}
    answer = call(hooked.url, "/invocations", body)
    rows = [json.loads(line) for line in answer.body.splitlines()]
    details = plain["details"]
    assert [row["id"] for row in rows] == [token["id"] for token in details["tokens"]]
    assert "".join(row["text"] for row in rows) == plain["generated_text"]
    found = [row["log_prob"] for row in rows]
    assert found == pytest.approx([token["log_prob"] for token in details["tokens"]], abs=1e-3)
    assert [row["first"] for row in rows] == [True, *[False] * 5]
    assert rows[-1]["reason"] == details["finish_reason"]
    assert not any("reason" in row for row in rows[:-1])


def test_hooks_agree_with_the_lane_without_hooks(
    hooked: RunningServer, demo_server: RunningServer
) -> None:
    """The same parameters give the same text, whether or not a hook formats it."""
    for parameters in (
        {"max_new_tokens": 12},
        {"max_new_tokens": 12, "temperature": 0.9, "seed": 7},
        {"max_new_tokens": 12, "repetition_penalty": 1.3},
        {"max_new_tokens": 12, "stop_sequences": ["ball"]},
        {"max_new_tokens": 12, "return_full_text": True},
        {"max_new_tokens": 12, "truncate": 2},
    ):
        body = {"inputs": "The moon is", "parameters": parameters}
        plain = call(demo_server.url, "/invocations", body).json()
        assert call(hooked.url, "/invocations", body).json()["answer"] == [plain["generated_text"]]


HANDLER = """
    from djl_python import Input, Output
    from djl_python.async_utils import create_non_stream_output
    from djl_python.encode_decode import decode
    import os

    started_with = []

    async def handle(inputs: Input):
        if inputs.is_empty():
            started_with.append(inputs.get_properties())
            raise RuntimeError("no input yet")
        request = inputs.get_batches()[0]
        payload = decode(request, request.get_property("Content-Type"))
        if "own" in payload:
            seen = started_with[0]
            return create_non_stream_output(
                {"cwd": os.getcwd(), "dir": seen["model_dir"], "len": seen["max_model_len"]}
            )
"""


def test_handler_is_called_at_start_and_replaces_ours(
    server_process: StartServer, tmp_path: Path
) -> None:
    """Its first call is empty and may fail; its folder is the working directory."""
    model = copy_model(tmp_path)
    write_code(model, HANDLER, "serve.py")
    environ = {"OPTION_ENTRYPOINT": "serve.py"}
    arguments = ("--port", "0", "-s", str(model), "--engine", "scripted")
    server = server_process(*arguments, environ=environ)
    url = server.url_when_ready(30)
    answer = call(url, "/invocations", {"own": 1})
    assert answer.json() == {"cwd": str(model), "dir": str(model), "len": "2048"}
    assert "generated_text" in call(url, "/invocations", {"inputs": "x"}).json()
    assert "no input yet" in server.stderr


def test_broken_code_ends_the_start(server_process: StartServer, tmp_path: Path) -> None:
    """Exit code 1, and the last line says why (each cause: tests/server/features)."""
    model = copy_model(tmp_path)
    write_code(model, "def f(:\n")
    server = server_process("--port", "0", "-s", str(model), "--engine", "scripted")
    assert server.wait_exit() == 1
    assert "model.py, line 1: SyntaxError" in server.stderr.splitlines()[-1]


def test_custom_code_none_serves_without_it(server_process: StartServer, tmp_path: Path) -> None:
    """The file stays where it is, unread, and the log says so."""
    model = copy_model(tmp_path)
    write_code(model, "raise SystemExit\n")
    arguments = ("--port", "0", "-s", str(model), "--engine", "scripted")
    server = server_process(*arguments, environ={"LMI_CUSTOM_CODE": "none"})
    url = server.url_when_ready(30)
    assert call(url, "/invocations", {"inputs": "x"}).status == 200
    assert "is not loaded: LMI_CUSTOM_CODE=none" in server.stderr
