"""Server processes forked from one that has imported vLLM already.

Most of the CPU time of a start are imports, the same for every start. The process of this module
imports them once and forks a server for each request. A server runs `python -m lmi_vllm` in a
process, a session and an environment of its own. Scenarios about starts, ends and what is imported
do without it, and so does a start with a variable that a library reads while it is imported
(`may_be_forked`).
"""

import array
import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import setproctitle

from lmi_vllm.engine.vllm.cpu.companions import hide_unfit_companions
from tests.support.engine_modules import import_engine_modules

ROOT = Path(__file__).resolve().parent.parent
# Read after the imports: by us, by clients of S3 and OpenTelemetry as they are made, by vLLM often.
_LATE = ("OPTION_", "SERVING_", "LMI_", "DJL_", "LWS_", "AWS_", "OTEL_EXPORTER_", "OTEL_BSP_")
_LATE_NAMES = (
    "HF_MODEL_ID", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR",
    "VLLM_CPU_OMP_THREADS_BIND", "VLLM_SERVER_DEV_MODE",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_COHERE_API",
    "VLLM_ENABLE_RESPONSES_API_STORE", "MAX_BATCH_SIZE", "SAGEMAKER_MULTI_MODEL",
    "SAGEMAKER_SECURE_MODE", "SAGEMAKER_SECURITY_CONTROLS", "SAGEMAKER_UNTRUSTED_CHANNELS",
)  # fmt: skip
# OpenMP reads it when torch is imported: a server with another number begins before that. A second
# thread waits for the first by spinning, which takes as much of the processor as the model's work.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# The server, and what vLLM's own HTTP application has besides.
_IMPORTED = (
    "lmi_vllm.commands.serve", "cohere", "prometheus_fastapi_instrumentator",
    "vllm.entrypoints.anthropic.api_router", "vllm.entrypoints.cohere.api_router",
)  # fmt: skip
# The variable that names the socket of the process that forks: another copy of the package, whose
# tests a test runs, has another.
_SOCKET = f"LMI_TEST_FORKS_{zlib.crc32(str(ROOT).encode()):08x}"
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_MOST_BYTES = 1 << 17  # of one request: its environment, mostly
_IMPORT_SECONDS = 240  # of vLLM, by the process that is forked; two busy cores take 70


class Start(NamedTuple):
    """What a server is started with."""

    script: str  # empty for none
    arguments: Sequence[str]
    environ: Mapping[str, str]  # all of it
    folder: str  # the working directory


def may_be_forked(arguments: Sequence[str], added: Mapping[str, str]) -> bool:
    """Whether a start with these words and variables may begin after the imports.

    One with several front-end processes may not: prometheus_client chooses when it is imported
    whether processes share their metrics. Nor may one with packages of its own (PYTHONPATH):
    transformers looks for torchvision once, when it is imported.
    """
    if added.get("LMI_FRONTEND_PROCESSES", "1") != "1":
        return False
    others = {item for item in added.items() if not item[0].startswith(_LATE)}
    is_late = all(name in _LATE_NAMES for name, _ in others - set(_ONE_THREAD.items()))
    return is_late and "scripted" not in arguments


class ForkedProcess:
    """One forked server, with those members of `subprocess.Popen` that scenarios use.

    It has the network of the thread that starts it. With `script` it runs that file, as
    `python SCRIPT -m lmi_vllm` would.
    """

    def __init__(
        self, arguments: Sequence[str], environ: Mapping[str, str], stderr: int, script: str = ""
    ) -> None:
        stdout, write_stdout = os.pipe()
        self._status, write_status = os.pipe()
        start = Start(script, list(arguments), dict(environ), str(Path.cwd()))
        request = json.dumps(start).encode()
        assert len(request) < _MOST_BYTES
        with Path("/proc/thread-self/ns/net").open("rb") as network:
            rights = array.array("i", [write_stdout, stderr, write_status, network.fileno()])
            _importer().sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(write_stdout)
        os.close(write_status)
        self.stdout = os.fdopen(stdout, encoding="utf-8")
        self.returncode: int | None = None
        self.pid = self._next_number(_IMPORT_SECONDS)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._next_number(timeout)
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _next_number(self, seconds: float | None) -> int:
        if not select.select([self._status], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired("forked server", seconds or 0)
        text = os.read(self._status, 20)
        assert text, "the process that forks servers has ended"
        return int(text)


@contextlib.contextmanager
def importing_process() -> Iterator[None]:
    """Run the process that imports and forks, for this one and those that it starts."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    with (
        tempfile.TemporaryDirectory(prefix="lmi-forks-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as its,
    ):
        path = f"{folder}/socket"
        its.bind(path)
        its.listen()
        with subprocess.Popen(
            [sys.executable, "-m", "integration.forked_server", str(its.fileno())],
            pass_fds=[its.fileno()], cwd=ROOT, env=environ | _ONE_THREAD, stdin=subprocess.PIPE,
        ):  # fmt: skip
            its.close()  # who connects after the process has ended is refused
            os.environ[_SOCKET] = path
            try:
                yield
            finally:
                del os.environ[_SOCKET]


@functools.cache
def _importer() -> socket.socket:
    """Return a connection to that process; start one for this process if there is none."""
    if _SOCKET not in os.environ:
        ended = contextlib.ExitStack()
        ended.enter_context(importing_process())
        atexit.register(ended.close)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.environ[_SOCKET])
    atexit.register(connection.close)
    return connection


def main() -> None:
    """Import what a server imports until it is ready, then fork servers until stdin ends."""
    clients = socket.socket(fileno=int(sys.argv[1]))
    import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the keepers
    connections: list[socket.socket] = []
    while True:
        readable, _, _ = select.select([sys.stdin, clients, *connections], [], [])
        if sys.stdin in readable:
            return
        for one in readable:
            if one is clients:
                connections.append(clients.accept()[0])
            elif not fork_for(one, [clients, *connections]):
                connections.remove(one)
                one.close()


def fork_for(client: socket.socket, inherited: Sequence[socket.socket]) -> bool:
    """Fork the server that a client asks for; returns whether it is still there."""
    body, descriptors, _, _ = socket.recv_fds(client, _MOST_BYTES, 4)
    if body and os.fork() == 0:
        for one in inherited:
            one.close()
        keep(Start(*json.loads(body)), *descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return bool(body)


def import_all() -> None:
    """Import vLLM as `VllmFactory.load` does, and what else a start imports on its way."""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    hide_unfit_companions()
    import_engine_modules()
    for module in _IMPORTED:
        importlib.import_module(module)
    import torch  # noqa: PLC0415 (slow)

    assert torch.get_num_threads() == 1, "every forked engine would have these threads"
    setproctitle.getproctitle()  # it looks for the place of the name beside the first environment


def keep(start: Start, stdout: int, stderr: int, status: int, network: int) -> NoReturn:
    """Fork one server; write its process id to `status`, and its exit code once it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (server := os.fork()) == 0:
        os.close(status)
        enter_network(network)
        serve(start, stdout, stderr)
    for descriptor in (stdout, stderr, network):
        os.close(descriptor)
    os.write(status, b"%d" % server)
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(status, b"%d" % code)
    os._exit(0)


def enter_network(network: int) -> None:
    """Enter the network namespace that a descriptor names, unless this process is in it."""
    if os.fstat(network).st_ino != Path("/proc/self/ns/net").stat().st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")
    os.close(network)


def serve(start: Start, stdout: int, stderr: int) -> NoReturn:
    """Be `python -m lmi_vllm` from here on, or `python SCRIPT -m lmi_vllm`."""
    script, arguments, environ, folder = start
    os.setsid()
    for descriptor, number in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # as if no library had asked for it yet
    words = ["-m", "lmi_vllm", *arguments]
    sys.argv = [script, *words] if script else words[1:]
    setproctitle.setproctitle(" ".join([sys.executable, *([script] if script else []), *words]))
    try:
        if script:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module("lmi_vllm", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (what the interpreter does with it, too)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
