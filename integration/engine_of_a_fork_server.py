"""The fork server forks engines, with their workers, where the server cannot: as if it had."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from integration.client import OpenStream, wait_until
from integration.conftest import READY_SECONDS, ServerProcess, StartServer
from integration.engine_restart import LONG, answers, is_back, ping
from integration.server_exit_cleans_up import short_folder
from lmi_vllm.engine.vllm.engine_processes import shared_memory_of

pytestmark = pytest.mark.vllm
__all__ = ["short_folder"]  # a fixture
FORK_SERVER = "lmi-vllm::fork-server"
CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker"
HAS_BEGUN = "can fork the engine's"
RANKS = 2
CONFIGURED = {
    "VLLM_WORKER_MULTIPROC_METHOD": "forkserver",
    "OPTION_TENSOR_PARALLEL_DEGREE": str(RANKS),
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
}
GONE_SECONDS = 20.0
NAMES = (None, "capitals", "json")
RESTARTS = {"SERVING_RETRY_THRESHOLD": "5"}
# A server on a CPU forks its engine whatever runs in it. This one must not, from its first engine.
UNFIT = """
import sys
from lmi_vllm import cli
from lmi_vllm.engine.vllm import factory
imported = factory.import_vllm
def import_vllm(arguments):
    checked, unfit = imported(arguments), "threads of gRPC run in the server's process"
    start = sys.modules["lmi_vllm.engine.vllm.start"]
    start.why_spawned = lambda *_, **__: unfit
    start.can_become_unfit = lambda *_, **__: True
    start.why_unfit = lambda: unfit
    return checked
factory.import_vllm = import_vllm
if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[3:]))  # after -m lmi_vllm
"""


def titled(server: ServerProcess, title: str) -> list[psutil.Process]:
    """Return the processes below the server with this title."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [one for one in found if any(title in word for word in one.cmdline()[:1])]


def only(server: ServerProcess, title: str) -> psutil.Process:
    """Return the one process with this title."""
    (found,) = titled(server, title)
    return found


def killed_and_back(server: ServerProcess, url: str, victim: psutil.Process) -> None:
    """Kill a process of the server's; the engine has ended, and a new one answers."""
    core = only(server, CORE)
    victim.kill()
    assert wait_until(lambda: ping(url)[0] == 503, GONE_SECONDS), server.describe()
    assert is_back(server, url), server.describe()
    assert only(server, CORE).pid != core.pid


def test_engine_is_forked_by_the_fork_server(server_process: StartServer) -> None:
    """A restart imports nothing; only the server's signals count; all end with the server."""
    server = server_process("--demo", "--port", "0", environ=RESTARTS | CONFIGURED)
    url = server.url_when_ready()
    before = answers(url, NAMES)
    fork_server, core = only(server, FORK_SERVER), only(server, CORE)
    assert (fork_server.ppid(), core.ppid()) == (server.process.pid, fork_server.pid)
    assert {one.ppid() for one in titled(server, WORKER)} == {core.pid}
    assert len(titled(server, WORKER)) == RANKS

    stream = OpenStream(url, "/invocations", {**LONG, "stream": True})
    for process in (fork_server, core, *titled(server, WORKER)):
        process.send_signal(signal.SIGTERM)  # as the manager of a service does to all of them
    assert wait_until(lambda: server.stderr.count("SIGTERM of process") == 1 + RANKS, GONE_SECONDS)
    killed_and_back(server, url, core)
    assert b'"code":500' in stream.rest().splitlines()[-1]
    assert only(server, CORE).ppid() == fork_server.pid
    assert answers(url, NAMES) == before

    killed_and_back(server, url, fork_server)  # the engine ends with it
    assert "the fork server ended, and the engine with it" in server.stderr
    second = only(server, FORK_SERVER)
    assert second.pid != fork_server.pid
    assert only(server, CORE).ppid() == second.pid
    killed_and_back(server, url, only(server, CORE))
    assert only(server, CORE).ppid() == second.pid  # it does not end with an engine
    assert answers(url, NAMES) == before
    processes = psutil.Process(server.process.pid).children(recursive=True)
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait_exit()
    assert not psutil.wait_procs(processes, GONE_SECONDS)[1]


def test_server_that_becomes_unfit_restarts_as_fast(
    server_process: StartServer, tmp_path: Path, short_folder: Path
) -> None:
    """Its first engine is spawned; another process imports vLLM while it serves."""
    script = tmp_path / "unfit.py"
    script.write_text(UNFIT)
    launcher = (sys.executable, str(script))
    environ = RESTARTS | {"TMPDIR": str(short_folder)}
    server = server_process("--demo", "--port", "0", environ=environ, launcher=launcher)
    url = server.url_when_ready()
    before = answers(url, NAMES)
    assert only(server, CORE).ppid() == server.process.pid
    assert wait_until(lambda: HAS_BEGUN in server.stderr, READY_SECONDS), server.describe()
    semaphores = shared_memory_of([only(server, CORE).pid])
    assert any("sem.mp-" in name for name in semaphores)
    killed_and_back(server, url, only(server, CORE))
    assert only(server, CORE).ppid() == only(server, FORK_SERVER).pid
    assert server.stderr.count("is spawned and imports vLLM again") == 1
    assert answers(url, NAMES) == before
    processes = psutil.Process(server.process.pid).children(recursive=True)
    server.process.terminate()
    assert server.wait_exit() == 0
    assert not psutil.wait_procs(processes, GONE_SECONDS)[1]
    assert "is ignored: the server ends its engine itself" not in server.stderr
    assert not list(short_folder.iterdir())
    assert not [name for name in semaphores if Path(name).exists()]
