"""SIGTERM at any moment of a start, of a restart and under load: an end in time, nothing left."""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration.client import Answer, OpenStream, call, wait_until
from integration.conftest import ServerProcess, StartServer
from integration.server_exit_cleans_up import DISCONNECT_SECONDS, are_gone, is_free, survivors
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.s3_server import BUCKET, s3_server

DEADLINE = 40
DRAIN_SECONDS = 25  # SERVING_SHUTDOWN_TIMEOUT's default


def phase(url: str) -> str:
    """Return the phase /ping shows, or the status where there is none."""
    (entry,) = json.loads(call(url, "/ping").body).values()
    return str(entry.get("phase", entry["status"]))


def end(server: ServerProcess, url: str) -> None:
    """Send SIGTERM, and see that it ends the process, in order, with all it had started."""
    children = server.children()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(DEADLINE) == 0, server.describe()
    assert wait_until(lambda: are_gone(children), DISCONNECT_SECONDS), survivors(children)
    assert is_free(url)


def test_before_the_port_is_open(server_process: StartServer) -> None:
    """Before a signal handler is installed: the signal itself ends the process."""
    server = server_process("--demo", "--port", "0")
    assert wait_until(lambda: psutil.Process(server.process.pid).cpu_times().user > 0.05, 10)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(DEADLINE) in (0, -signal.SIGTERM)


def test_as_soon_as_the_port_is_open(server_process: StartServer) -> None:
    """While settings are read and vLLM begins to be imported."""
    server = server_process("--demo", "--port", "0")
    end(server, server.wait_listening())


def test_with_a_closed_stdout(server_process: StartServer, tmp_path: Path) -> None:
    """What a start prints goes nowhere, and the end is in order."""
    path = tmp_path / "s"
    shell = ("sh", "-c", 'exec "$0" "$@" >&-', sys.executable)
    words, address = (
        ("--demo", "--engine", "scripted"),
        {"SERVING_INFERENCE_ADDRESS": f"unix:{path}"},
    )
    server = server_process(*words, environ=address, launcher=shell)
    assert wait_until(path.is_socket, DEADLINE), server.describe()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(DEADLINE) == 0, server.describe()


def test_while_the_model_is_fetched(server_process: StartServer, tmp_path: Path) -> None:
    """A download that stands still holds nothing up, and leaves no half model behind."""
    with s3_server() as store:
        files = {path.name: path.read_bytes() for path in DEMO_MODEL_DIR.glob("*.*")}
        store.put({f"tiny/{name}": body for name, body in files.items()})
        store.pause = threading.Event()
        try:
            server = server_process(
                "--port", "0",
                environ={
                    **store.environ,
                    "HF_MODEL_ID": f"s3://{BUCKET}/tiny/",
                    "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
                },
            )  # fmt: skip
            url = server.wait_listening()
            assert wait_until(lambda: phase(url) == "download", 20), server.describe()
            assert wait_until(lambda: "model.safetensors" in str(store.objects_sent), 30)
            end(server, url)
        finally:
            store.pause.set()
    assert not [path for path in tmp_path.rglob("config.json") if ".part" not in str(path)]


@pytest.mark.vllm
@pytest.mark.parametrize("wanted", ["adapters", "warm-up"])
def test_while_the_model_becomes_ready(server_process: StartServer, wanted: str) -> None:
    """The last steps of a start: the engine is there, and the server is not ready yet."""
    server = server_process("--demo", "--port", "0")
    url = server.wait_listening()
    assert wait_until(lambda: phase(url) in (wanted, "warm-up", "Healthy"), 120)
    end(server, url)


@pytest.mark.vllm
def test_while_the_engine_comes_back(server_process: StartServer) -> None:
    """A restart under way is given up, and none of its temporary files stays."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # room for a socket's name
        environ = {"SERVING_RETRY_THRESHOLD": "5", "TMPDIR": folder}
        server = server_process("--demo", "--port", "0", environ=environ)
        url = server.url_when_ready()
        (engine,) = server.children()
        engine.kill()
        assert wait_until(lambda: phase(url) == "engine", 10)
        assert wait_until(lambda: any(child.pid != engine.pid for child in server.children()), 60)
        end(server, url)
        assert list(Path(folder).iterdir()) == []


@pytest.mark.vllm
def test_engine_that_dies_in_the_drain_is_not_restarted(server_process: StartServer) -> None:
    """It would serve no client: the process ends as soon as its clients know."""
    server = server_process(
        "--demo", "--port", "0", environ={"SERVING_RETRY_THRESHOLD": "5"}
    )  # fmt: skip
    url = server.url_when_ready()
    stream = OpenStream(url, "/invocations", request(1900, stream=True))
    (engine,) = server.children()
    server.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: phase(url) == "DRAINING", 5)
    engine.kill()
    assert json.loads(stream.rest().splitlines()[-1])["code"] == 500
    assert server.wait_exit(DRAIN_SECONDS) in (0, 1)
    assert "restarting the engine" not in server.stderr
    assert is_free(url)


def request(tokens: int, *, stream: bool) -> dict[str, Any]:
    """Return a request that runs for so many tokens."""
    parameters = {"max_new_tokens": tokens, "ignore_eos_token": True}
    return {"inputs": "Once upon a time", "parameters": parameters, "stream": stream}


@pytest.mark.vllm
def test_every_request_under_load_ends(server_process: StartServer) -> None:
    """More than the engine runs at once, streams and not: whole answers or said refusals."""
    server = server_process("--demo", "--port", "0", environ={"OPTION_MAX_ROLLING_BATCH_SIZE": "4"})
    url = server.url_when_ready()
    (engine,) = server.children()
    answers: list[Answer] = []

    def ask(number: int) -> None:
        payload = request(400 + number, stream=number % 2 == 0)
        answers.append(call(url, "/invocations", payload, seconds=DEADLINE * 2))

    workers = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    engine.suspend()  # so that none has ended before the last one has come
    for worker in workers:
        worker.start()
    assert wait_until(lambda: b'"requestInQueue":24' in call(url, "/models/model").body, 20)
    engine.resume()
    began = time.monotonic()
    end(server, url)
    assert time.monotonic() - began < DRAIN_SECONDS + 10
    for worker in workers:
        worker.join(DEADLINE)
    assert len(answers) == len(workers)  # none was cut off: `call` would have raised
    for answer in answers:
        last = json.loads(answer.body.splitlines()[-1])
        assert "generated_text" in last or last["code"] in (500, 503), answer.body[-300:]
    whole = sum(b'"generated_text"' in answer.body for answer in answers)
    assert whole >= 4, [answer.body[-100:] for answer in answers]


def test_no_process_ignores_sigterm(server_process: StartServer) -> None:
    """A server without a model ends as well."""
    server = server_process("--port", "0", environ={"SERVING_LOAD_MODELS": "NONE"})
    url = server.wait_listening()
    assert wait_until(lambda: call(url, "/ping").status == 200, 10)
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.wait_exit(10) == 0
