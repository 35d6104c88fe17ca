"""Output formatters written for LMI's rolling batch: what clients get, and how they are called."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from lmi_vllm.errors import EngineFailureError
from lmi_vllm.features.custom_code.calling import CodeCaller
from lmi_vllm.features.custom_code.functions import FileFunctions
from lmi_vllm.features.custom_code.loading import load_model_code
from lmi_vllm.features.custom_code.model_code import CustomCode
from lmi_vllm.features.scripted.engine import Fail, ScriptedEngine
from lmi_vllm.messages import GeneratedToken, GenerationChunk, TokenLogprob
from tests.conftest import ServeScripted
from tests.support.hook_files import write_code

TOKENS = (
    GeneratedToken(5, "He", -0.25),
    GeneratedToken(6, "llo", -0.5),
    GeneratedToken(2, "", -1.0, True),
)
WHOLE = GenerationChunk(0, TOKENS, "Hello", "stop", prompt_tokens=3)
STREAM = (
    GenerationChunk(0, TOKENS[:1], "He", prompt_tokens=3),
    GenerationChunk(0, TOKENS[1:], "llo", "stop", prompt_tokens=3),
)
# As in LMI's document of this signature: three values, a row for each token.
DOCUMENTED = """
    import json
    from djl_python.output_formatter import TextGenerationOutput, output_formatter

    @output_formatter
    def rows(request_output: TextGenerationOutput) -> str:
        best = request_output.sequences[request_output.best_sequence_index]
        next_token, is_first_token, is_last_token = best.get_next_token()
        row = {"id": next_token.id, "text": next_token.text, "p": next_token.log_prob}
        if is_last_token:
            row["finish_reason"] = best.finish_reason
        return json.dumps(row) + "\\n"
"""
ROWS = (
    '{"id": 5, "text": "He", "p": -0.25}\n'
    '{"id": 6, "text": "llo", "p": -0.5}\n'
    '{"id": 2, "text": "", "p": -1.0, "finish_reason": "eos_token"}\n'
)
FOUR_VALUES = DOCUMENTED.replace("next_token, is_first", "next_token, index, is_first")
QUOTED = DOCUMENTED.replace(": TextGenerationOutput", ': "TextGenerationOutput"')
UNDECORATED = DOCUMENTED.replace("@output_formatter\n", "\n")
# The signature before that one, with the request's number.
SIX = """
    import json
    from djl_python.output_formatter import output_formatter

    @output_formatter
    def rows(token, first_token, last_token, details, generated_tokens, request_id):
        row = {"id": token.id, "text": token.text, "p": token.log_prob}
        if last_token:
            row["finish_reason"] = details["finish_reason"]
            assert (generated_tokens, details["generated_tokens"]) == ("Hello", 3)
            assert (details["inputs"], details["prompt_tokens"]) == ("x", 3)
        return json.dumps(row) + "\\n"
"""
FIVE = SIX.replace(", request_id", "")
WAITS = """
    import json
    from djl_python.output_formatter import TextGenerationOutput, output_formatter

    @output_formatter
    def at_the_end(request_output: TextGenerationOutput) -> str:
        if not request_output.finished:
            return ""
        given = request_output.input
        found = {i: "".join(t.text for t in s.tokens) for i, s in request_output.sequences.items()}
        return json.dumps([given.input_text, given.parameters.get("n"), found])
"""


def code_of(folder: Path, text: str, formatter: str | None = None) -> CustomCode:
    """Return the code of a model directory's file."""
    functions: FileFunctions = load_model_code(write_code(folder, text), "handle", formatter)
    return CustomCode(functions, CodeCaller(timeout_seconds=20))


FILES = {
    "documented": DOCUMENTED, "four-values": FOUR_VALUES, "quoted": QUOTED,
    "undecorated": UNDECORATED, "six-arguments": SIX, "five-arguments": FIVE,
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_older_formatter_writes_each_token(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path, name: str, *, is_streamed: bool
) -> None:
    """Both signatures are called for each token, as in LMI; their texts together are the body."""
    engine.script = STREAM if is_streamed else (WHOLE,)
    client = await serve(code=code_of(tmp_path, FILES[name], "rows"))
    body = {"inputs": "x", "parameters": {"details": True}, "stream": is_streamed}
    answer = await client.post("/invocations", json=body)
    assert (answer.status, await answer.text()) == (200, ROWS)
    assert answer.content_type == ("application/jsonlines" if is_streamed else "application/json")
    assert engine.jobs[0].sampling["logprobs"] == 0


async def test_formatter_that_waits_writes_once(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """An empty text is nothing; several candidates are all there at the end."""
    engine.script = (WHOLE,)
    client = await serve(code=code_of(tmp_path, WAITS))
    answer = await client.post("/invocations", json={"inputs": "x"})
    assert await answer.json() == ["x", None, {"0": "Hello"}]
    other = GenerationChunk(1, TOKENS[:1], "He", "length", cumulative_logprob=-9.0)
    engine.script = (WHOLE, other)
    body = {"inputs": "x", "parameters": {"n": 2, "do_sample": True}}
    answer = await client.post("/invocations", json=body)
    assert await answer.json() == ["x", 2, {"0": "Hello", "1": "He"}]


async def test_list_of_prompts_is_an_array(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """Each prompt has its own request; what is no JSON is a text."""
    client = await serve(code=code_of(tmp_path, WAITS))
    answer = await client.post("/invocations", json={"inputs": ["x y", "z"]})
    assert [row[0] for row in await answer.json()] == ["x y", "z"]
    assert {job.request_id[-2:] for job in engine.jobs} == {"-0", "-1"}


async def test_other_requests_do_without_it(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """LMI called such formatters for `inputs` alone: chats and completions are vLLM's own."""
    client = await serve(code=code_of(tmp_path, DOCUMENTED))
    for path, body in (
        ("/v1/chat/completions", {"messages": []}),
        ("/invocations", {"messages": []}),
        ("/invocations", {"prompt": "x"}),
    ):
        answer = await client.post(path, json=body)
        assert (await answer.json())["object"] in ("chat/completions", "completions")
    assert len(engine.calls) == 3


INPUT_AND_OUTPUT = """
    from djl_python import Input
    from djl_python.encode_decode import decode
    from djl_python.input_parser import input_formatter
    from djl_python.output_formatter import TextGenerationOutput, output_formatter
    from djl_python.request_io import TextInput

    class Own(TextInput):
        trace = None

    @input_formatter
    def read(item: Input, **kwargs):
        payload = decode(item, item.get_property("Content-Type"))
        own = Own()
        own.input_text, own.parameters = payload["ask"], payload.get("parameters", {})
        own.trace = payload["trace"]
        return own

    @output_formatter
    def write(request_output: TextGenerationOutput):
        return request_output.input.trace if request_output.finished else ""
"""


async def test_output_formatter_sees_the_fields_of_the_input(
    serve: ServeScripted, tmp_path: Path
) -> None:
    """A TextInput with further fields is the answer's `input`, that of its own request."""
    client = await serve(code=code_of(tmp_path, INPUT_AND_OUTPUT))
    for trace in ("a", "b"):
        answer = await client.post("/invocations", json={"ask": "x", "trace": trace})
        assert await answer.text() == trace


async def test_client_cannot_choose_another_formatter(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """`parameters.output_formatter` named one of LMI's own; the model's code stays in place."""
    engine.script = (WHOLE,)
    client = await serve(code=code_of(tmp_path, WAITS))
    body = {"inputs": "x", "parameters": {"output_formatter": "jsonlines"}}
    assert await (await client.post("/invocations", json=body)).json() == [
        "x",
        None,
        {"0": "Hello"},
    ]


async def test_failures_are_rows_or_424(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """Before the first byte a status, after it the last row, the formatter's and the engine's."""
    failing = dedent(DOCUMENTED).replace(
        "if is_last_token:", "if is_last_token: raise OSError('no')"
    )
    failing = failing.replace('\n        row["finish_reason"] = best.finish_reason', "")
    client = await serve(code=code_of(tmp_path, failing))
    engine.script = STREAM
    answer = await client.post("/invocations", json={"inputs": "x", "stream": True})
    *_, last = (await answer.text()).splitlines()
    assert json.loads(last) == {"error": "Custom formatter failed: no", "code": 424}
    engine.script = (WHOLE,)
    assert (await client.post("/invocations", json={"inputs": "x"})).status == 424
    engine.script = (STREAM[0], Fail(EngineFailureError("broken")))
    answer = await client.post("/invocations", json={"inputs": "x", "stream": True})
    *_, last = (await answer.text()).splitlines()
    assert json.loads(last) == {"error": "broken", "code": 500}


async def test_top_tokens_and_prompt_tokens_are_there(
    serve: ServeScripted, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """`top_n_tokens` and `decoder_input_details` reach the formatter as in LMI."""
    text = WAITS.replace(
        'return json.dumps([given.input_text, given.parameters.get("n"), found])',
        "return json.dumps([request_output.get_top_tokens_as_dict(), "
        "request_output.get_prompt_tokens_as_dict()])",
    )
    top = (TokenLogprob(5, "He", -0.25), TokenLogprob(9, "Ho", -2.0))
    token = GeneratedToken(5, "He", -0.25, top=top)
    prompt = (TokenLogprob(3, " x", -4.0),)
    engine.script = (GenerationChunk(0, (token,), "He", "length", prompt_logprobs=prompt),)
    client = await serve(code=code_of(tmp_path, text))
    body = {"inputs": "x", "parameters": {"top_n_tokens": 2, "decoder_input_details": True}}
    assert await (await client.post("/invocations", json=body)).json() == [
        [[{"id": 5, "text": "He", "log_prob": -0.25}, {"id": 9, "text": "Ho", "log_prob": -2.0}]],
        [{"id": 3, "text": " x", "log_prob": -4.0}],
    ]
