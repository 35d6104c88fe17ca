"""An idle model gives its memory back: its engine ends, and another answers the next request.

The real engine on a CPU, alone and with a second front-end process. vLLM's own levels need a GPU
(`python -m integration.gpu --only 'idle sleep'`).
"""

import concurrent.futures
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from integration.client import Answer, OpenStream, call, wait_until
from integration.conftest import RunningServer, ServerProcess, StartServer
from integration.engine_restart import answers, engine_of, ping, start
from integration.front_ends_share_one_engine import ask, front_ends, is_listening
from integration.processes_of_a_server import template_of
from lmi_vllm.features.front_ends.hanging import LIVENESS_SECONDS
from tests.support.hook_files import write_code

REPLACED_SECONDS = 3 * LIVENESS_SECONDS
pytestmark = pytest.mark.vllm
ASLEEP_SECONDS = 60.0
NAMES = (None, "json", "capitals")
LONG = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 40}, "stream": True}


def fell_asleep(server: ServerProcess, url: str, engine: psutil.Process) -> bool:
    """Return whether the model sleeps in time, and its engine's process has ended."""
    assert wait_until(lambda: ping(url)[1]["status"] == "Asleep", ASLEEP_SECONDS), server.describe()
    return wait_until(lambda: not engine.is_running(), ASLEEP_SECONDS)


def test_idle_model_ends_its_engine_and_wakes_with_its_adapters(
    server_process: StartServer,
) -> None:
    """Each answer is as before, probes stay 200, and what only reads wakes nothing."""
    server, url = start(server_process, LMI_SLEEP_AFTER_SECONDS="3")
    before = answers(url, NAMES)
    for _ in range(2):
        assert fell_asleep(server, url, engine_of(server))
        for path in ("/ping", "/ready", "/health", "/live", "/v2/health/ready", "/metrics"):
            assert call(url, path).status == 200, path
        listed = call(url, "/v1/models").json()["data"]
        assert {card["id"] for card in listed} >= {"json", "capitals"}
        assert len(call(url, "/adapters").json()["adapters"]) == 2
        assert ping(url)[1]["status"] == "Asleep"
        assert answers(url, NAMES) == before
    text = call(url, "/metrics").body.decode()
    assert "lmi_wake_seconds_count 2.0" in text
    assert "lmi_engine_restarts_total 0.0" in text
    assert fell_asleep(server, url, engine_of(server))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(30) == 0


def test_requests_that_come_together_wake_it_once(server_process: StartServer) -> None:
    """Streams, lists, chat and texts to split: all of them wait for one engine."""
    server, url = start(server_process, LMI_SLEEP_AFTER_SECONDS="3")
    assert fell_asleep(server, url, engine_of(server))
    asked = {
        "/invocations": {"inputs": ["a", "b"], "parameters": {"max_new_tokens": 4}},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
        "/v1/completions": {"prompt": "x", "max_tokens": 4, "stream": True},
        "/tokenize": {"prompt": "x"},
        "/v1/responses": {"input": "x", "max_output_tokens": 4},
    }
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        stream = pool.submit(OpenStream, url, "/invocations", LONG)
        found = {path: pool.submit(call, url, path, body) for path, body in asked.items()}
        assert {path: one.result().status for path, one in found.items()} == dict.fromkeys(
            asked, 200
        )
        assert b'"generated_text"' in stream.result().rest()
    assert "lmi_wake_seconds_count 1.0" in call(url, "/metrics").body.decode()


def test_processes_of_one_server_sleep_and_wake_together(server_process: StartServer) -> None:
    """Whichever of them a connection reaches."""
    server = server_process(
        "--demo", "--port", "0",
        environ={"LMI_SLEEP_AFTER_SECONDS": "4", "LMI_FRONTEND_PROCESSES": "2"},
    )  # fmt: skip
    url = server.url_when_ready()
    before = answers(url, NAMES)
    for _ in range(2):
        assert wait_until(lambda: ping(url)[1]["status"] == "Asleep", ASLEEP_SECONDS)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(lambda _: answers(url, NAMES), range(8)))
        assert texts == [before] * 8
    assert json.loads(call(url, "/server/sleep").body)["wakes_on_request"] is False


def test_front_end_that_ends_in_a_sleep_is_replaced_in_it(server_process: StartServer) -> None:
    """By the template while the engine is paused; by a spawned one, which imports vLLM, asleep.

    Also one that hangs. A waking does not wait for the one that imports.
    """
    environ = {
        "LMI_FRONTEND_PROCESSES": "2", "VLLM_SERVER_DEV_MODE": "1", "LMI_API_KEY": "key",
        "LMI_WAKE_TIMEOUT": "0",
    }  # fmt: skip
    server = server_process("--demo", "--port", "0", environ=environ)
    url, key = server.url_when_ready(), {"Authorization": "Bearer key"}

    def act(path: str, payload: object = None) -> bytes:
        answer = call(url, path, payload, method="POST", headers=key, seconds=180)
        assert answer.status == 200, answer.body
        return answer.body

    before = act("/invocations", LONG)
    act("/pause")  # the engine is there, and answers nothing
    second = next_front_end(server)
    assert ping(url)[1]["status"] == "Asleep"
    act("/resume")
    assert wait_until(lambda: is_listening(second), ASLEEP_SECONDS), server.describe()
    assert ask(url, second, "/invocations", LONG, headers=key).body == before
    act("/server/sleep")
    template = template_of(server.process.pid)
    assert template is not None
    template.kill()
    third = next_front_end(server, signal.SIGSTOP)
    assert not is_listening(third)  # there is no engine that it could join
    assert ping(url)[1]["status"] == "Asleep"
    assert act("/invocations", LONG) == before
    assert third in front_ends(server)
    assert not is_listening(third)  # requests wait for an engine, and not for it
    assert wait_until(lambda: is_listening(third), ASLEEP_SECONDS), server.describe()
    assert ask(url, third, "/invocations", LONG, headers=key).body == before


def next_front_end(server: ServerProcess, number: signal.Signals = signal.SIGKILL) -> int:
    """Kill or stop the process beside the first, and return the one that takes its place."""
    first, other = front_ends(server)
    os.kill(other, number)
    assert wait_until(lambda: {*front_ends(server)} - {first, other} != set(), REPLACED_SECONDS)
    (new,) = {*front_ends(server)} - {first, other}
    return new


def put_to_sleep(url: str) -> None:
    """Have the model sleep by a call."""
    answer = call(url, "/server/sleep", method="POST")
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["is_given_back"]


def test_sessions_and_deferred_answers_wake_it(demo_server: RunningServer) -> None:
    """A client that comes later gets its answer; one that is there is read without waking."""
    url, say = demo_server.url, {"inputs": "The capital of France is"}
    before = call(url, "/invocations", say).body
    put_to_sleep(url)
    deferred = call(url, "/invocations", say, headers={"x-synchronous": "false"})
    token = {"x-starting-token": deferred.headers["x-next-token"]}
    assert call(url, "/invocations", b"", headers=token).status == 202
    assert call(url, "/server/sleep", method="POST").status == 409
    assert wait_until(lambda: call(url, "/invocations", b"", headers=token).status == 200, 60)
    put_to_sleep(url)
    assert call(url, "/invocations", b"", headers=token).body == before
    assert ping(url)[1]["status"] == "Asleep"
    made = call(url, "/invocations", {"requestType": "NEW_SESSION"})
    name = "x-amzn-sagemaker-session-id"
    session = {name: made.headers[name].split(";")[0]}
    for payload in (say, {"requestType": "CLOSE"}):
        put_to_sleep(url)
        assert call(url, "/invocations", payload, headers=session).status == 200


HANDLER = """
    from djl_python import Output

    async def handle(inputs):
        asked = inputs.get_as_json()
        return Output().add_as_json({"own": True}) if "own" in asked else None
"""


def test_code_of_the_model_answers_with_each_engine(
    server_process: StartServer, tmp_path: Path
) -> None:
    """In place of the engine, and with the built-in answer of the next one."""
    code = write_code(tmp_path, HANDLER)
    _, url = start(server_process, OPTION_ENTRYPOINT=str(code))
    asked = ({"own": 1}, {"inputs": "The capital of France is"})
    before = [call(url, "/invocations", payload).body for payload in asked]
    assert json.loads(before[0]) == {"own": True}
    for payload, body in zip(asked, before, strict=True):
        put_to_sleep(url)
        assert call(url, "/invocations", payload).body == body


def test_model_that_embeds_wakes_on_each_of_its_routes(embedding_server: RunningServer) -> None:
    """Vectors of the next engine are those of the last one."""
    url = embedding_server.url
    asked = {
        "/invocations": {"inputs": ["rain"]},
        "/v1/embeddings": {"input": "rain"},
        "/score": {"text_1": "rain", "text_2": "sea"},
        "/pooling": {"input": "rain"},
    }
    before = {path: without_names(call(url, path, body)) for path, body in asked.items()}
    for path, body in asked.items():
        put_to_sleep(url)
        assert without_names(call(url, path, body)) == before[path]


def without_names(answer: Answer) -> object:
    """Return a good answer's document, without what differs each time."""
    assert answer.status == 200, answer.body
    document = json.loads(answer.body)
    own = ("id", "created")
    if isinstance(document, dict):
        return {name: value for name, value in document.items() if name not in own}
    return document


def test_encoder_and_decoder_sleep(server_process: StartServer, tmp_path: Path) -> None:
    """They run in an engine of ours, which ends and comes back in the same way."""
    from tests.support.text_models import tiny_t5  # noqa: PLC0415 (imports torch)

    words = ("--model", str(tiny_t5(tmp_path / "t5")), "--port", "0")
    server = server_process(*words, is_forked=True)
    url, say = server.url_when_ready(), {"inputs": "a b", "parameters": {"max_new_tokens": 5}}
    before = call(url, "/invocations", say).body
    put_to_sleep(url)
    assert call(url, "/invocations", say).body == before


def test_next_process_knows_how_long_a_start_takes(
    server_process: StartServer, tmp_path: Path
) -> None:
    """It was kept beside compiled code: the second start says what is left, as does its waking."""
    server, url = start(server_process, VLLM_CACHE_ROOT=str(tmp_path))
    put_to_sleep(url)
    assert call(url, "/server/sleep", method="DELETE").status == 200
    assert wait_until(lambda: "again_seconds" in kept_seconds(tmp_path), 10)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(30) == 0
    assert min(kept_seconds(tmp_path).values()) > 0
    server = server_process("--demo", "--port", "0", environ={"VLLM_CACHE_ROOT": str(tmp_path)})
    url = server.wait_listening()
    assert wait_until(lambda: ping(url)[1].get("seconds_left", 0) > 0, ASLEEP_SECONDS)


def kept_seconds(root: Path) -> dict[str, float]:
    """Return what the file of the one model has, once it has both."""
    [path] = (root / "lmi_vllm").glob("*.json")
    return {name: value for name, value in json.loads(path.read_text()).items() if value}


@pytest.mark.parametrize("level", ["1", "2"])
def test_levels_of_vllm_are_refused_on_a_cpu(server_process: StartServer, level: str) -> None:
    """By name, with what is possible there; vLLM's worker would ignore them."""
    server = server_process(
        "--demo", "--port", "0", environ={"LMI_SLEEP_LEVEL": level}, is_forked=True
    )
    assert server.wait_exit(60) == 1
    assert f"LMI_SLEEP_LEVEL={level}" in server.stderr
    assert "needs a GPU" in server.stderr
