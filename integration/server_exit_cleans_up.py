"""However the server or its engine ends: no process left, the port free, clients told."""

import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from integration.client import OpenStream, call, wait_until
from integration.conftest import ServerProcess, StartServer

pytestmark = pytest.mark.vllm
ENGINE_KILLED = "lmi-vllm: error: the engine process died: killed by SIGKILL"
DISCONNECT_SECONDS = 15  # the kernel may be busy freeing their memory
LONG = {
    "inputs": "Once upon a time",
    "parameters": {"max_new_tokens": 1800, "ignore_eos_token": True},
    "stream": True,
}


def start(
    server_process: StartServer, *, is_forked: bool = False, **environ: str
) -> tuple[ServerProcess, str]:
    """Return a ready server on the embedded model and its URL."""
    words = ("--demo", "--port", "0")
    server = server_process(*words, environ=environ, is_forked=is_forked)
    return server, server.url_when_ready()


def is_free(url: str) -> bool:
    """Whether another server could listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        except OSError:
            return False
        return True


def are_gone(processes: list[psutil.Process]) -> bool:
    """Whether none of the processes runs; a zombie that is not reaped yet runs no more."""
    return not survivors(processes)


def survivors(processes: list[psutil.Process]) -> list[str]:
    """Return each process that still runs, with what helps to see why."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            status = process.status()
            if process.is_running() and status != psutil.STATUS_ZOMBIE:
                command = " ".join(process.cmdline())
                found.append(f"{process.pid} of {process.ppid()}, {status}: {command}")
    return found


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Yield a folder whose path leaves room for a socket's name, as pytest's own do not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_sigterm_ends_in_order(server_process: StartServer, short_folder: Path) -> None:
    """SIGTERM: exit 0, no engine process, the port free, no temporary file or socket."""
    server, url = start(server_process, TMPDIR=str(short_folder))
    children = server.children()
    assert children
    assert any(path.is_socket() for path in short_folder.rglob("*"))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert wait_until(lambda: are_gone(children), DISCONNECT_SECONDS), survivors(children)
    assert is_free(url)
    assert not list(short_folder.iterdir())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_sigkill_ends_the_engine_and_frees_the_port(
    server_process: StartServer, method: str
) -> None:
    """SIGKILL: the kernel ends the engine too; it held neither our port nor a client's socket.

    Forked engines are prepared by our fork hook, spawned ones (all of CUDA's) by our vLLM plugin.
    """
    if method == "fork":  # which a CPU has without being told
        server, url = start(server_process, is_forked=True)
    else:
        server, url = start(server_process, VLLM_WORKER_MULTIPROC_METHOD=method)
    children = server.children()
    assert children
    client = OpenStream(url, "/invocations", LONG)
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait_exit()
    assert wait_until(lambda: are_gone(children), DISCONNECT_SECONDS), survivors(children)
    assert is_free(url)
    client.rest()  # ends: no other process holds the connection open


def test_engine_death_fails_requests_and_ends_the_process(
    server_process: StartServer, short_folder: Path
) -> None:
    """The engine killed: the stream ends with an error row, the process with 1 and a reason.

    No temporary file is left: those of the killed process lie in a folder of the server's.
    """
    server, url = start(server_process, is_forked=True, TMPDIR=str(short_folder))
    client = OpenStream(url, "/invocations", LONG)
    for child in server.children():
        child.kill()
    assert json.loads(client.rest().splitlines()[-1])["code"] == 500
    assert server.wait_exit(15) == 1
    assert server.stderr.splitlines()[-1] == ENGINE_KILLED
    assert is_free(url)
    assert not list(short_folder.iterdir())


def test_engine_killed_at_its_start_is_named(server_process: StartServer) -> None:
    """By its signal: vLLM says that the cause is above, where nothing is."""
    server = server_process("--demo", "--port", "0", is_forked=True)
    assert wait_until(lambda: bool(server.children()), 60), server.describe()
    for child in server.children():
        child.send_signal(signal.SIGABRT)
    assert server.wait_exit(60) == 1
    last = "the engine did not start: its process EngineCore ended: killed by SIGABRT"
    assert server.stderr.splitlines()[-1] == f"lmi-vllm: error: {last}"


def test_sigterm_while_the_engine_starts_leaves_nothing(server_process: StartServer) -> None:
    """SIGTERM in the middle of a start ends the process and whatever it had started."""
    server = server_process("--demo", "--port", "0")
    url = server.wait_listening()
    wait_until(lambda: "engine" in call(url, "/ping").body.decode(), 60)
    wait_until(lambda: bool(server.children()), 60)
    children = server.children()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(40) == 0
    assert wait_until(lambda: are_gone(children), DISCONNECT_SECONDS), survivors(children)
    assert is_free(url)
