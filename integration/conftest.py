"""Real server processes: started in a group of their own, killed whatever happens."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration.forked_server import ForkedProcess, may_be_forked
from lmi_vllm.telemetry.log_handler import GATHER_SECONDS
from tests.support.engine_starts import STARTS

READY_SECONDS = 300.0  # a start that fails ends; one that waits for cores does not
# Programs and their parts: importing them for tests fetches packages and changes sys.path.
collect_ignore_glob = ["*/*.py"]


@dataclass
class ServerProcess:
    """One `python -m lmi_vllm serve` and what it printed."""

    process: subprocess.Popen[str] | ForkedProcess
    stderr_path: Path
    lines: "queue.Queue[str]" = field(default_factory=queue.Queue)
    seen: list[str] = field(default_factory=list)

    def wait_for_line(self, start: str, seconds: float = READY_SECONDS) -> str:
        """Return the first line on stdout that begins with `start`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line {start!r} within {seconds} s; {self.describe()}")
            self.seen.append(line)
            if line.startswith(start):
                return line
            if not line:
                pytest.fail(f"the server ended without a line {start!r}; {self.describe()}")

    def wait_listening(self) -> str:
        """Return the URL once the port is open."""
        return self.wait_for_line("Listening on ", 20).split()[-1]

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Return once the model answers."""
        self.wait_for_line("Ready on ", seconds)

    def url_when_ready(self, seconds: float = READY_SECONDS) -> str:
        """Return the URL once the model answers on it."""
        url = self.wait_listening()
        self.wait_ready(seconds)
        return url

    def wait_exit(self, seconds: float = 120) -> int:
        """Return the exit code."""
        return self.process.wait(seconds)

    @property
    def stderr(self) -> str:
        """All of stderr so far."""
        time.sleep(4 * GATHER_SECONDS)  # lines that have been said are on their way
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines of the log so far; what torch or pip write themselves is left out."""
        lines = (line for line in self.stderr.splitlines() if line.startswith('{"time":'))
        return [json.loads(line) for line in lines]

    def children(self) -> list[psutil.Process]:
        """Return every process the server started, and theirs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def describe(self) -> str:
        """Return what helps to see why a test failed."""
        return f"stdout {self.seen}, stderr:\n{self.stderr[-4000:]}"

    def kill(self) -> None:
        """End the server and everything it started."""
        leftovers = self.children()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in leftovers:  # engines have a process group of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait(10)


StartServer = Callable[..., ServerProcess]


def start_server(
    folder: Path,
    *arguments: str,
    environ: dict[str, str] | None = None,
    verb: str = "serve",
    launcher: Sequence[str] = (sys.executable,),
    is_forked: bool = False,
) -> ServerProcess:
    """Start `python -m lmi_vllm`; its stdout is read by a thread, its stderr goes to a file.

    `launcher` is what comes before `-m`: another interpreter, a command around this one, or this
    one and a script. With `is_forked` the server begins after its imports, where that makes no
    difference.
    """
    stderr_path = folder / f"stderr-{time.monotonic_ns()}.txt"
    words, variables = [verb, *arguments], clean_environment() | (environ or {})
    with stderr_path.open("w", encoding="utf-8") as stderr:
        process: subprocess.Popen[str] | ForkedProcess
        if is_forked and may_be_forked(words, environ or {}):
            process = ForkedProcess(words, variables, stderr.fileno(), *launcher[1:])
        else:
            process = subprocess.Popen(
                [*launcher, "-m", "lmi_vllm", *words],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
    server = ServerProcess(process, stderr_path)
    began = time.monotonic()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as stdout:
            for line in stdout:
                if line.startswith("Ready on ") and "scripted" not in arguments:
                    STARTS.add("integration", time.monotonic() - began)
                server.lines.put(line.rstrip("\n"))
        server.lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return server


def clean_environment() -> dict[str, str]:
    """Return the environment without anything that configures us."""
    # vLLM and torch write variables of their own where tests import them in this process.
    theirs = ("VLLM_", "TORCHINDUCTOR_", "TRITON_")
    prefixes = ("OPTION_", "SERVING_", "LMI_", "SAGEMAKER_", "HF_", "DJL_", *theirs)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    # Two bound threads that wait for each other stall for seconds when the machine is busy.
    return kept | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[StartServer]:
    """Start servers for one test; they are gone afterwards."""
    started: list[ServerProcess] = []

    def start(*arguments: str, **options: Any) -> ServerProcess:
        server = start_server(tmp_path, *arguments, **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.kill()


@dataclass(frozen=True)
class RunningServer:
    """A ready server and its URL."""

    process: ServerProcess
    url: str


@contextlib.contextmanager
def running_server(folder: Path, *arguments: str, **options: Any) -> Iterator[RunningServer]:
    """A ready server on a free port for the body: what fixtures of many tests share.

    `folder` keeps its stderr; `options` are those of `start_server`.
    """
    server = start_server(folder, *arguments, "--port", "0", is_forked=True, **options)
    try:
        yield RunningServer(server, server.url_when_ready())
    finally:
        server.kill()


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model on the real engine, started once for all tests that only talk to it."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    with running_server(tmp_path_factory.mktemp("demo"), "--demo") as server:
        yield server


@pytest.fixture(scope="session")
def embedding_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT that embeds, configured by `option.task` alone."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.tiny_models import bert_embedder  # noqa: PLC0415 (imports torch)

    folder = bert_embedder(tmp_path_factory.mktemp("embedder") / "model")
    properties = "option.task=text-embedding\noption.enforce_eager=true\noption.dtype=fp32\n"
    (folder / "serving.properties").write_text(properties, encoding="utf-8")
    # What Cohere's `input_type` may be: vLLM refuses it of models without such prompts.
    prompts = {"prompts": {"search_document": "sea ", "search_query": "rain "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def embedding_server(embedding_folder: Path) -> Iterator[RunningServer]:
    """Our server over that model."""
    with running_server(embedding_folder.parent, "--model", str(embedding_folder)) as server:
        yield server


@pytest.fixture(scope="session")
def speech_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Whisper."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.speech_model import whisper  # noqa: PLC0415 (imports torch)

    folder = whisper(tmp_path_factory.mktemp("speech") / "model")
    properties = "option.enforce_eager=true\noption.dtype=fp32\noption.max_num_seqs=4\n"
    (folder / "serving.properties").write_text(properties, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def speech_server(speech_folder: Path) -> Iterator[RunningServer]:
    """Our server over that model: no other of the suite hears."""
    pytest.importorskip("soundfile", reason="needs soundfile: make setup installs it")
    with running_server(speech_folder.parent, "--model", str(speech_folder)) as server:
        yield server


@pytest.fixture(scope="session")
def tgi_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model in TGI mode, with a tool-call parser and all routes of vLLM's.

    Without a key: those that act on the server are there, and refuse to.
    """
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    environ = {
        "OPTION_TGI_COMPAT": "true",
        "OPTION_ENABLE_AUTO_TOOL_CHOICE": "true",
        "OPTION_TOOL_CALL_PARSER": "hermes",
        "OPTION_ENABLE_SCALE_OUT": "true",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_ENABLE_COHERE_API": "1",
    }
    folder = tmp_path_factory.mktemp("tgi")
    with running_server(folder, "--demo", environ=environ) as server:
        yield server


SCRIPTED = ("--demo", "--engine", "scripted")
TEN_TOKENS_A_SECOND = {"LMI_SCRIPTED_SECONDS_PER_TOKEN": "0.1"}


@pytest.fixture(scope="session")
def shared_scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """As `scripted_server`, for all tests that neither end nor configure it."""
    folder = tmp_path_factory.mktemp("scripted")
    with running_server(folder, *SCRIPTED, environ=TEN_TOKENS_A_SECOND) as server:
        yield server


@pytest.fixture
def scripted_server(server_process: StartServer) -> RunningServer:
    """A ready server on the scripted engine, ten tokens a second, of one test's own."""
    server = server_process(*SCRIPTED, "--port", "0", environ=TEN_TOKENS_A_SECOND)
    return RunningServer(server, server.url_when_ready(20))
