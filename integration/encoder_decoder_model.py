"""A T5 as a process: clients that join midway get Transformers' own tokens, on every lane.

And what goes wrong: a stop, clients that go, requests and options that its engine does not have, a
step that fails, a shutdown in the middle. Fields and prompts that no model can take harm no other.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration.client import OpenStream, call, send, wait_until
from integration.conftest import RunningServer, ServerProcess, StartServer, running_server
from tests.support.hostile_values import hostile_bodies

pytestmark = pytest.mark.vllm
PROMPTS = (
    "The capital of France is",
    "moon",
    "translate English to German: How old are you? The house is wonderful, and the lamp is red.",
    "Once upon a time there was",
    "summarize: a b c d e f g",
    "it sailed to the north, where the moon is cold",
)
LONG = {"max_new_tokens": 600, "ignore_eos_token": True}
# A hook that breaks the model's next step on request, as a device that is gone would.
BREAKING_CODE = """
from djl_python.input_parser import input_formatter
from transformers import T5ForConditionalGeneration

whole = T5ForConditionalGeneration.forward


def broken(*_, **__):
    T5ForConditionalGeneration.forward = whole
    raise RuntimeError("the device is gone")


@input_formatter
def to_payload(decoded_payload, tokenizer=None):
    if decoded_payload.get("inputs") == "break":
        T5ForConditionalGeneration.forward = broken
    return decoded_payload
"""


@pytest.fixture(scope="session")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, written once."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.text_models import tiny_t5  # noqa: PLC0415 (imports torch)

    return tiny_t5(tmp_path_factory.mktemp("t5") / "model")


@pytest.fixture(scope="session")
def t5_server(t5_folder: Path) -> Iterator[RunningServer]:
    """A server that was told nothing but where the model is, and to run four rows at once."""
    environ = {"OPTION_MAX_ROLLING_BATCH_SIZE": "4"}
    with running_server(t5_folder.parent, "--model", str(t5_folder), environ=environ) as server:
        yield server


@pytest.fixture(scope="module")
def expected(t5_folder: Path) -> Callable[[str, int], tuple[list[int], str]]:
    """Return tokens and text of Transformers' own greedy answer."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: PLC0415 (slow)

    model: Any = AutoModelForSeq2SeqLM.from_pretrained(t5_folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(t5_folder)

    def answer(prompt: str, count: int) -> tuple[list[int], str]:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=False,
            max_new_tokens=count,
        )[0, 1:].tolist()  # fmt: skip
        return tokens, str(tokenizer.decode(tokens, skip_special_tokens=True))

    return answer


def ask(url: str, lane: str, prompt: str, count: int) -> tuple[list[int], str]:
    """Return the tokens and the text of a greedy answer by one of the ways to ask."""
    if lane.startswith("completions"):
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True,
                "stream": lane.endswith("streamed")}  # fmt: skip
        answer = call(url, "/v1/completions", body)
        assert answer.status == 200, answer.body
        rows = (
            [json.loads(line[6:]) for line in answer.body.decode().splitlines() if "{" in line]
            if body["stream"] else [answer.json()]
        )  # fmt: skip
        choices = [choice for row in rows for choice in row["choices"]]
        ids = [token for choice in choices for token in choice["token_ids"]]
        return ids, "".join(choice["text"] for choice in choices)
    parameters = {"max_new_tokens": count, "details": True}
    is_streaming = lane == "lmi streamed"
    payload = {"inputs": prompt, "parameters": parameters, "stream": is_streaming}
    answer = call(url, "/invocations", payload)
    assert answer.status == 200, answer.body
    if is_streaming:
        rows = answer.lines()
        return [row["token"]["id"] for row in rows], rows[-1]["generated_text"]
    details = answer.json()["details"]
    return [token["id"] for token in details["tokens"]], answer.json()["generated_text"]


def running_requests(url: str) -> int:
    """Return how many sequences the engine holds, running and waiting."""
    return int(_counter(url, "lmi_engine_sequences{"))


def test_clients_that_join_midway_get_transformers_tokens(
    t5_server: RunningServer, expected: Callable[[str, int], tuple[list[int], str]]
) -> None:
    """Prompts and answers of many lengths at once, over more clients than rows, on four lanes."""
    lanes = itertools.cycle(("lmi", "lmi streamed", "completions", "completions streamed"))
    counts = itertools.cycle((60, 7, 33, 1, 90))
    asked = [(next(lanes), prompt, next(counts)) for prompt in PROMPTS * 4]
    with ThreadPoolExecutor(10) as clients:
        answers = list(clients.map(lambda one: ask(t5_server.url, *one), asked))
    for (lane, prompt, count), answer in zip(asked, answers, strict=True):
        assert answer == expected(prompt, count), (lane, prompt, count)
    assert len({token for tokens, _ in answers for token in tokens}) > 20


def test_late_and_short_is_answered_while_a_long_one_runs(t5_server: RunningServer) -> None:
    """A request that comes later joins the batch: it does not wait for the answer before it."""
    url = t5_server.url
    long = OpenStream(url, "/invocations", {"inputs": "moon", "parameters": LONG, "stream": True})
    assert call(url, "/invocations", {"inputs": "moon", "parameters": {"max_new_tokens": 2}}).status
    assert running_requests(url) == 1
    rows = long.rest().splitlines()
    assert json.loads(rows[-1])["generated_text"]


def test_stop_string_ends_an_answer(
    t5_server: RunningServer, expected: Callable[[str, int], tuple[list[int], str]]
) -> None:
    """The text ends before it, and details say why."""
    _, whole = expected(PROMPTS[0], 60)
    stop = whole[11:14]
    parameters = {"max_new_tokens": 60, "stop": [stop], "details": True}
    answer = call(t5_server.url, "/invocations", {"inputs": PROMPTS[0], "parameters": parameters})
    assert answer.json()["generated_text"] == whole[: whole.index(stop)]
    assert answer.json()["details"]["finish_reason"] == "stop_sequence"


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize(
    ("path", "payload"),
    [
        ("/invocations", {"inputs": "moon", "parameters": LONG}),
        ("/v1/completions", {"prompt": "moon", "max_tokens": 600, "ignore_eos": True}),
        ("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "moon"}], "max_tokens": 600,
            "ignore_eos": True}),
    ],
)  # fmt: skip
def test_client_disconnect_frees_its_batch_row(
    t5_server: RunningServer, path: str, payload: dict[str, object], is_streaming: bool
) -> None:
    """Within a second nothing runs any more, whether the client read a stream or waited."""
    url = t5_server.url
    if is_streaming:
        connection = OpenStream(url, path, payload | {"stream": True})
        assert wait_until(lambda: running_requests(url) == 1, 5)
        connection.drop()
    else:
        waiting = send(url, path, payload)
        assert wait_until(lambda: running_requests(url) == 1, 5)
        waiting.close()
    assert wait_until(lambda: running_requests(url) == 0, 1)


@pytest.mark.parametrize(
    ("path", "payload", "status", "words"),
    [
        ("/invocations", {"inputs": "x", "parameters": {"num_beams": 4}}, 424, "num_beams"),
        ("/invocations", {"inputs": "x", "parameters": {"guided_regex": "a"}}, 424, "guided"),
        ("/invocations", {"inputs": "x", "parameters": {
            "decoder_input_details": True, "details": True}}, 424, "decoder_input_details"),
        ("/invocations", {"inputs": "moon " * 900}, 424, "max_model_len"),
        ("/invocations", {"inputs": "x", "parameters": {"max_new_tokens": 9999}}, 424,
         "max_model_len"),
        ("/invocations", {"inputs": "x", "adapters": "german"}, 424, "german"),
        ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo"),
        ("/v1/completions", {"prompt": "x", "model": "german"}, 404, "german"),
        ("/v1/embeddings", {"input": "x"}, 404, "not found"),
    ],
)  # fmt: skip
def test_unsupported_parameters_of_the_engine_are_refused_by_name(
    t5_server: RunningServer, path: str, payload: dict[str, object], status: int, words: str
) -> None:
    """A 4xx that names the field; the server lives."""
    answer = call(t5_server.url, path, payload)
    assert (answer.status, words in answer.body.decode()) == (status, True), answer.body
    assert call(t5_server.url, "/ping").status == 200


def test_metrics_count_its_work(t5_server: RunningServer) -> None:
    """Tokens of prompts and answers, as on vLLM."""
    before = _counter(t5_server.url, "lmi_generated_tokens_total")
    parameters = {"max_new_tokens": 9, "ignore_eos_token": True}
    call(t5_server.url, "/invocations", {"inputs": "moon", "parameters": parameters})
    assert _counter(t5_server.url, "lmi_generated_tokens_total") == before + 9


def _counter(url: str, name: str) -> float:
    lines = call(url, "/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_adapters_end_the_start(server_process: StartServer, t5_folder: Path) -> None:
    """An option that the engine does not have is named, with where it was set."""
    environ = {"OPTION_ENABLE_LORA": "true", "OPTION_QUANTIZE": "fp8"}
    server = server_process(
        "--model", str(t5_folder), "--port", "0", environ=environ, is_forked=True
    )
    assert server.process.wait(60) == 1
    last = server.stderr.strip().splitlines()[-1]
    for words in ("enable_lora=True (OPTION_ENABLE_LORA)", "quantization=fp8 (OPTION_QUANTIZE)"):
        assert words in last


def test_failing_step_is_logged_and_ends_the_process(
    server_process: StartServer, t5_folder: Path, tmp_path: Path
) -> None:
    """Who runs gets an error row; the log has the cause, the exit code says so."""
    server, url = _started(server_process, _with_code(t5_folder, tmp_path))
    stream = OpenStream(url, "/invocations", {"inputs": "moon", "parameters": LONG, "stream": True})
    assert wait_until(lambda: running_requests(url) == 1, 5)
    breaking = send(url, "/invocations", {"inputs": "break"})
    assert "error" in json.loads(stream.rest().splitlines()[-1])
    assert server.process.wait(60) == 1
    breaking.close()
    assert "the device is gone" in server.stderr


def test_engine_that_died_comes_back(
    server_process: StartServer, t5_folder: Path, tmp_path: Path
) -> None:
    """With `retry_threshold` another one takes its place, and answers the same."""
    environ = {"SERVING_RETRY_THRESHOLD": "1"}
    server, url = _started(server_process, _with_code(t5_folder, tmp_path), environ)
    payload = {"inputs": "moon", "parameters": {"max_new_tokens": 20}}
    before = call(url, "/invocations", payload)
    assert call(url, "/invocations", {"inputs": "break"}).status >= 500
    assert wait_until(lambda: _counter(url, "lmi_engine_restarts_total") == 1, 60)
    assert call(url, "/ping").status == 200
    assert call(url, "/invocations", payload).body == before.body
    assert server.process.poll() is None


def test_shutdown_drains_running_requests(server_process: StartServer, t5_folder: Path) -> None:
    """SIGTERM: new work is refused, the stream goes on to its last token, the process ends."""
    server, url = _started(server_process, t5_folder)
    stream = OpenStream(url, "/invocations", {"inputs": "moon", "parameters": LONG, "stream": True})
    assert wait_until(lambda: running_requests(url) == 1, 5)
    os.kill(server.process.pid, signal.SIGTERM)
    rows = [json.loads(row) for row in stream.rest().splitlines()]
    assert len(rows) >= 590
    assert rows[-1]["generated_text"]
    assert server.process.wait(60) == 0


def _with_code(model: Path, folder: Path) -> Path:
    """Return a model directory with the files of `model` and the hook beside them."""
    target = folder / "model"
    target.mkdir()
    for path in model.iterdir():
        (target / path.name).symlink_to(path)
    (target / "model.py").write_text(BREAKING_CODE, encoding="utf-8")
    return target


def _started(
    server_process: StartServer, folder: Path, environ: dict[str, str] | None = None
) -> tuple[ServerProcess, str]:
    server = server_process(
        "--model", str(folder), "--port", "0", environ=environ or {}, is_forked=True
    )
    return server, server.url_when_ready()


ROWS = (*hostile_bodies(),)
BESIDE = {"inputs": "moon", "parameters": {**LONG, "max_new_tokens": 150}}


@pytest.fixture(scope="module")
def alone(t5_server: RunningServer) -> str:
    """The text of the stream beside hostile fields, when nothing is beside it."""
    text: str = call(t5_server.url, "/invocations", BESIDE).json()["generated_text"]
    return text


@pytest.mark.parametrize(("name", "bodies"), ROWS, ids=[row[0] for row in ROWS])
def test_hostile_fields_harm_no_other_request(
    t5_server: RunningServer, alone: str, name: str, bodies: list[dict[str, Any]]
) -> None:
    """As on vLLM: refused or answered on both lanes, and the stream beside them is whole."""
    url = t5_server.url
    stream = OpenStream(url, "/invocations", {**BESIDE, "stream": True})
    statuses = [call(url, "/v1/completions", body, seconds=30).status for body in bodies]
    for body in bodies:
        parameters = {key: body[key] for key in body if key not in ("prompt", "max_tokens")}
        payload = {"inputs": "x", "parameters": {"max_new_tokens": 4, **parameters}}
        statuses.append(call(url, "/invocations", payload, seconds=30).status)
    rows = stream.rest().splitlines()
    assert json.loads(rows[-1])["generated_text"] == alone
    assert max(statuses) < 500, (name, statuses)
    assert call(url, "/ping").status == 200


@pytest.mark.parametrize(
    ("path", "payload"),
    [
        ("/invocations", {"inputs": "moon " * 1_200_000}),
        ("/v1/completions", {"prompt": "moon " * 1_200_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "moon " * 1_200_000}]}),
    ],
)
def test_long_prompt_is_refused_before_it_is_tokenized(
    t5_server: RunningServer, path: str, payload: dict[str, object]
) -> None:
    """6 MB took 3 to 33 s, in which no other prompt was tokenized."""
    began = time.monotonic()
    answer = call(t5_server.url, path, payload)
    assert (answer.status in (400, 424), b"characters" in answer.body) == (True, True), answer.body
    assert time.monotonic() - began < 2.0


def test_long_prompt_is_cut_before_it_is_tokenized(t5_server: RunningServer) -> None:
    """Of 6 MB a few tokens are kept: the same as of a short text, at either side."""
    few, many = "moon " * 100, "moon " * 1_200_000
    for side in ("left", "right"):
        fields = {"truncate_prompt_tokens": 5, "truncation_side": side, "return_token_ids": True}
        body = {"max_tokens": 2, "temperature": 0, **fields}
        began = time.monotonic()
        long, short = (
            call(t5_server.url, "/v1/completions", {"prompt": prompt, **body}).json()["choices"][0]
            for prompt in (many, few)
        )
        assert long["prompt_token_ids"] == short["prompt_token_ids"]
        assert time.monotonic() - began < 2.0
