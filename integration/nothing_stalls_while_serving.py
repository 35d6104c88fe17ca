"""What would stop every stream of a ready server for a while is done before, or not at all."""

import http.client
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp.test_utils import unused_port

from integration.client import call, wait_until
from integration.conftest import RunningServer, StartServer, running_server
from tests.support.slowdown import slowdown

# A thread beside the server says what the collector would look through, then ends the process.
PROGRAM = """
import gc, os, signal, sys, threading, time, urllib.request
from lmi_vllm.cli import main

def report():
    port = int(sys.argv[-1])
    while True:
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/ping").status == 200:
                break
        except OSError:
            time.sleep(0.2)
    line = f"FROZEN {gc.get_freeze_count()} {len(gc.get_objects())}\\n"
    os.write(2, line.encode())  # at once, or a line of the log comes between
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=report, daemon=True).start()
main(sys.argv[3:])
"""


@pytest.mark.vllm
def test_imported_objects_are_frozen(server_process: StartServer, tmp_path: Path) -> None:
    """Almost everything is out of the collector's sight once the model is ready."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    script = tmp_path / "watched.py"
    script.write_text(PROGRAM, encoding="utf-8")
    server = server_process(
        "--demo", "--port", str(unused_port()), launcher=(sys.executable, str(script)),
        is_forked=True,
    )  # fmt: skip
    assert server.wait_exit() == 0
    (line,) = [row for row in server.stderr.splitlines() if row.startswith("FROZEN")]
    frozen, seen = map(int, line.split()[1:])
    assert frozen > 300_000
    assert seen < frozen / 10


GRAMMAR_SECONDS = 5.0


@dataclass(frozen=True)
class Watched:
    """A server, and the folder that torch would compile into."""

    server: RunningServer
    compiled: Path


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The embedded model on the real engine."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    folder = tmp_path_factory.mktemp("watched")
    environ = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        "LMI_GRAMMAR_TIMEOUT": str(GRAMMAR_SECONDS),
    }
    with running_server(folder, "--demo", environ=environ) as server:
        yield Watched(server, folder / "compiled")


@pytest.mark.vllm
def test_nothing_is_compiled_on_cpu(watched: Watched) -> None:
    """Log probabilities of several candidates made vLLM run a C++ compiler for 5 to 25 s."""
    url = watched.server.url
    parameters = {"max_new_tokens": 3, "details": True, "top_n_tokens": 3}
    for more in ({}, {"do_sample": True, "top_k": 5, "top_p": 0.9}, {"do_sample": True, "seed": 1}):
        body = {"inputs": "The moon is", "parameters": {**parameters, **more}}
        answer = call(url, "/invocations", body)
        assert len(answer.json()["details"]["top_tokens"][0]) == 3
    assert not [path for path in watched.compiled.rglob("*") if path.is_file()]


@pytest.mark.vllm
def test_no_log_probabilities_at_all_can_be_had(server_process: StartServer) -> None:
    """The first token that proves the model does not ask for what the settings forbid."""
    environ = {"OPTION_MAX_LOGPROBS": "0", "OPTION_STREAM_LOGPROBS": "false"}
    server = server_process("--demo", "--port", "0", environ=environ, is_forked=True)
    url = server.url_when_ready()
    assert call(url, "/invocations", {"inputs": "The moon is"}).status == 200


def ask_slow(url: str, address: str, number: int) -> http.client.HTTPConnection:
    """Ask, from an address of this machine, for a grammar that takes a minute."""
    fields = {f"p{index}": {} for index in range(300)}
    schema = {"type": "object", "properties": fields, "minProperties": number}
    port = int(url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, 180, (address, 0))
    payload = {"inputs": "a", "parameters": {"guided_json": schema}}
    connection.request("POST", "/invocations", json.dumps(payload))
    return connection


def ordinary_request(url: str, name: str) -> float:
    """Return the seconds that an ordinary grammar takes, one that was not asked for before."""
    began = time.monotonic()
    payload = {"inputs": "a", "parameters": {"guided_regex": f"[0-9]{{4}}-{name}"}}
    assert call(url, "/invocations", payload).status == 200
    return time.monotonic() - began


@pytest.mark.vllm
def test_slow_grammars_delay_no_other_request(watched: Watched) -> None:
    """Sixteen clients that disconnect, and sixteen that wait, from two addresses of their own."""
    server, url = watched.server.process, watched.server.url
    for connection in [ask_slow(url, "127.0.0.2", 100 + number) for number in range(16)]:
        connection.close()
    after_disconnects = ordinary_request(url, "first")
    waiting = [ask_slow(url, "127.0.0.3", 130 + number) for number in range(16)]
    time.sleep(0.5)
    beside_others = ordinary_request(url, "second")
    for connection in waiting:
        connection.close()
    assert (after_disconnects < 2 * GRAMMAR_SECONDS, beside_others < 2 * GRAMMAR_SECONDS) == (
        True,
        True,
    )
    time.sleep(1)
    assert ordinary_request(url, "third") < 2 * GRAMMAR_SECONDS
    assert wait_until(lambda: len(server.children()) == 1, 5)


@pytest.mark.vllm
def test_addresses_whose_grammars_were_slow_come_last(watched: Watched) -> None:
    """Twelve of them that ask again do not make another wait; in turn it would be 20 s."""
    url = watched.server.url
    evil = [f"127.0.1.{number}" for number in range(1, 13)]
    refused = [ask_slow(url, address, 50 + number) for number, address in enumerate(evil)]
    for connection in refused:
        assert connection.getresponse().status == 424
        connection.close()
    for each in range(2):
        again = [ask_slow(url, address, 200 + number) for number, address in enumerate(evil)]
        time.sleep(0.5)
        seconds = ordinary_request(url, f"fourth-{each}")
        for connection in again:
            connection.close()
        assert seconds < 2 * GRAMMAR_SECONDS * slowdown()
