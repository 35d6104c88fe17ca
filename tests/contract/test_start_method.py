"""When the engine's process is forked and when it is spawned; that it works is the suites' affair.

What only a GPU shows is in integration/gpu (`forked engine`).
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmi_vllm.engine.vllm.workarounds.engine_context import ForkServerChild
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.messages import EngineArguments
from lmi_vllm.private_folders import new_private_folder
from tests.support.assembled import PARTS

pytestmark = pytest.mark.vllm
# The one call of the driver that is asked, with CUDA_ERROR_NOT_INITIALIZED, or CUDA_SUCCESS.
DRIVER = "int cuCtxGetCurrent(void **context) { *context = 0; return %d; }"
# What a process of the fork server says: a variable that was set after it began, its exit code,
# whether its parent is the fork server, and whether it has vLLM without having imported it.
FORK_SERVER_AT_WORK = """
import json, logging, os, sys, time
from lmi_vllm.engine.vllm import fork_server
from lmi_vllm.engine.vllm.workarounds.engine_context import EngineContext
def say(pipe):
    pipe.send([os.environ["LATE"], os.getppid(), "vllm.v1.engine.core" in sys.modules])
if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    fork_server.CHECK_SECONDS = 0.1
    server, reasons = fork_server.ForkServer(), json.loads(sys.argv[1])
    server.begin(None if reasons is None else lambda: reasons.pop(0))
    server.begin(lambda: sys.exit("only the first call does"))
    assert server.wait() and server.is_ready
    os.environ["LATE"] = "passed on"
    context = EngineContext()
    ours, theirs = context.Pipe()
    process = context.Process(target=say, args=(theirs,))
    process.start()
    late, parent, has_vllm = ours.recv()
    process.join()
    print(json.dumps([late, str(process.exitcode), parent != os.getpid(), has_vllm]))
"""
FAILING_FORK_SERVER = """
import logging
from lmi_vllm.engine.vllm import fork_server
if __name__ == "__main__":
    logging.basicConfig()
    fork_server.PRELOADED = "preloaded_here"
    server = fork_server.ForkServer()
    server.begin()
    print(server.wait())
"""
GRPC_AT_WORK = """
import grpc
from lmi_vllm.engine.vllm import start_method
channel = grpc.insecure_channel("127.0.0.1:1")
before = start_method.unfit_library(["python3"])
try:
    grpc.channel_ready_future(channel).result(timeout=0.5)
except grpc.FutureTimeoutError:
    pass
print([before, start_method.unfit_library(start_method._native_thread_names())])
"""


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Unblock what a chosen method blocks: later tests start processes that inherit it."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.mark.parametrize(
    ("reason", "set_by_user", "is_ready", "method", "for_vllm"),
    [
        ("", None, False, "fork", "fork"),
        ("", None, True, "fork", "fork"),
        ("CUDA is initialised", None, False, "spawn", "spawn"),
        ("CUDA is initialised", None, True, "forkserver", "fork"),
        ("", "spawn", True, "spawn", "spawn"),
        ("CUDA is initialised", "fork", True, "fork", "fork"),
        ("", "forkserver", True, "forkserver", "fork"),
        ("CUDA is initialised", "forkserver", True, "forkserver", "fork"),
        ("", "forkserver", False, "fork", "fork"),  # it was tried in vain
        ("CUDA is initialised", "forkserver", False, "spawn", "spawn"),
    ],
)
def test_engine_is_forked_unless_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    set_by_user: str | None,
    is_ready: bool,
    method: str,
    for_vllm: str,
) -> None:
    """What the operator sets counts; vLLM spawns by itself where CUDA is initialised.

    Workers are forked from an engine core that was forked, by whatever process.
    """
    from lmi_vllm.engine.vllm import start  # noqa: PLC0415 (imports vLLM)

    monkeypatch.setenv(start.START_METHOD, "spawn")  # as vLLM leaves it on a CPU
    monkeypatch.setattr(start, "CONFIGURED_METHOD", set_by_user)
    monkeypatch.setattr(start, "why_spawned", lambda *_, **__: reason)
    fork_server = SimpleNamespace(is_ready=is_ready, wait=lambda: is_ready)
    chosen = start._choose_start_method(EngineArguments({}), fork_server, is_cpu=False)
    assert (chosen, os.environ[start.START_METHOD]) == (method, for_vllm)


async def test_method_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before vLLM is imported, whose list lacks the fork server."""
    from lmi_vllm.engine.vllm import factory  # noqa: PLC0415 (imports vLLM)

    monkeypatch.setattr(factory, "CONFIGURED_METHOD", "forkservr")
    monkeypatch.setattr(factory, "import_vllm", None)
    made = factory.VllmFactory({}, "text", PARTS.engines.vllm)
    with pytest.raises(ConfigurationError) as refused:
        await made.load(EngineArguments({}))
    assert "VLLM_WORKER_MULTIPROC_METHOD=forkservr: it can be fork, spawn, forkserver" in str(
        refused.value
    )


def test_workers_of_another_node_are_spawned_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no fork server, since no engine restarts there."""
    from lmi_vllm.engine.vllm import start  # noqa: PLC0415 (imports vLLM)

    monkeypatch.setenv(start.START_METHOD, "fork")
    monkeypatch.setattr(start, "CONFIGURED_METHOD", "forkserver")
    assert start._choose_start_method(EngineArguments({}), None, is_cpu=True) == "spawn"


def test_plain_vllm_knows_no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its function for a context is replaced while the fork server starts an engine."""
    from vllm.v1.engine import utils  # noqa: PLC0415 (imports vLLM)

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "forkserver")
    with pytest.raises(ValueError, match="forkserver"):
        utils.get_mp_context()


def test_vllm_takes_the_context_of_the_fork_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Although it has decided to spawn; its word of that would be wrong in the log."""
    from vllm.utils import system_utils  # noqa: PLC0415 (imports vLLM)
    from vllm.v1.engine import coordinator, utils  # noqa: PLC0415 (imports vLLM)

    from lmi_vllm.engine.vllm.start import _forking_elsewhere  # noqa: PLC0415 (imports vLLM)

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(system_utils, "cuda_is_initialized", lambda: True)
    with _forking_elsewhere():
        for module in (utils, coordinator):
            assert module.get_mp_context().Process is ForkServerChild
    assert not caplog.records
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert utils.get_mp_context().get_start_method() == "spawn"
    assert "must use the `spawn`" in caplog.text


def script(folder: Path, text: str) -> Path:
    """Return a file with a program: a process that is started finds no function of `-c`."""
    path = folder / "program.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("reasons", "said"),
    [(None, ""), (["", "CUDA is initialised"], "for a restart of the engine: CUDA is initialised")],
)
def test_fork_server_begins_when_there_is_a_reason(
    tmp_path: Path, reasons: list[str] | None, said: str
) -> None:
    """Once, or at once without asking; then it has forked a process already."""
    done = subprocess.run(
        [sys.executable, script(tmp_path, FORK_SERVER_AT_WORK), json.dumps(reasons)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert json.loads(done.stdout) == ["passed on", "0", True, True]
    assert (said in done.stderr) if said else "restart" not in done.stderr
    assert "can fork the engine's" in done.stderr


@pytest.mark.parametrize(
    ("preloaded", "is_ready"),
    [("", True), ("raise OSError", False), ("raise ImportError", False), ("exit(1)", False)],
)
def test_fork_server_that_fails_is_not_used(tmp_path: Path, preloaded: str, is_ready: bool) -> None:
    """The engine is spawned then, and the log says so."""
    (tmp_path / "preloaded_here.py").write_text(preloaded)
    done = subprocess.run(
        [sys.executable, script(tmp_path, FAILING_FORK_SERVER)],
        capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.strip() == str(is_ready)
    assert ("will be spawned" in done.stderr) is not is_ready


@pytest.mark.parametrize(
    ("set_by_user", "unfit", "said"),
    [
        (None, "", ""),
        ("fork", "", ""),
        ("spawn", "", "VLLM_WORKER_MULTIPROC_METHOD=spawn"),
        ("forkserver", "", "VLLM_WORKER_MULTIPROC_METHOD=forkserver"),
        (None, "threads of gRPC run", "threads of gRPC run"),
        ("fork", "threads of gRPC run", "threads of gRPC run"),
    ],
)
def test_front_ends_are_forked_unless_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, set_by_user: str | None, unfit: str, said: str
) -> None:
    """On a CPU, too; nothing makes a process fit that is not."""
    from lmi_vllm.engine.vllm import factory, start  # noqa: PLC0415 (imports vLLM)

    monkeypatch.setattr(start, "CONFIGURED_METHOD", set_by_user)
    monkeypatch.setattr(start, "why_unfit", lambda: unfit)
    log = logging.getLogger("vllm")
    monkeypatch.setattr(log, "handlers", [])
    assert factory.why_not_forked() == said
    monkeypatch.setattr(log, "handlers", [logging.NullHandler()])  # its file's lock may be held
    own = "vLLM's log has handlers of its own"
    assert factory.why_not_forked() == (said if "METHOD" in said else own)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, ""),
        ({"nnodes": 2}, "other nodes"),
        ({"distributed_executor_backend": "ray"}, "other nodes"),
        ({"data_parallel_backend": "ray"}, "other nodes"),
        ({"numa_bind": True}, "numa_bind"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, ""),
    ],
)
def test_arguments_that_need_a_new_process_are_named(
    monkeypatch: pytest.MonkeyPatch, values: Mapping[str, object], said: str
) -> None:
    """On CUDA without a driver in use the arguments decide; a CPU forks whatever they are."""
    from lmi_vllm.engine.vllm import start_method  # noqa: PLC0415 (imports vLLM)

    cuda = SimpleNamespace(is_cuda=lambda: True, device_name="cuda")
    monkeypatch.setattr(start_method, "current_platform", cuda)
    arguments = EngineArguments(values)
    assert start_method.why_spawned(arguments, is_cpu=True) == ""
    found = start_method.why_spawned(arguments, is_cpu=False)
    assert (said in found) if said else not found


def test_other_devices_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork was tried on CUDA only."""
    from lmi_vllm.engine.vllm import start_method  # noqa: PLC0415 (imports vLLM)

    rocm = SimpleNamespace(is_cuda=lambda: False, device_name="rocm")
    monkeypatch.setattr(start_method, "current_platform", rocm)
    assert "rocm" in start_method.why_spawned(EngineArguments({}), is_cpu=False)


@pytest.mark.parametrize(("answer", "is_initialized"), [(3, False), (0, True)])
def test_driver_is_asked_whether_it_is_initialised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, is_initialized: bool
) -> None:
    """By the driver's own code, since any library may have called it."""
    from lmi_vllm.engine.vllm import start_method  # noqa: PLC0415 (imports vLLM)

    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, for a stand-in of the driver")
    library = tmp_path / "libcuda.so.1"
    (tmp_path / "driver.c").write_text(DRIVER % answer)
    subprocess.run([compiler, "-shared", "-o", library, tmp_path / "driver.c"], check=True)
    monkeypatch.setattr(start_method, "_DRIVER", str(library))
    assert start_method.driver_is_initialized() is is_initialized


def test_no_driver_is_not_initialised() -> None:
    """A machine without a GPU has none."""
    from lmi_vllm.engine.vllm import start_method  # noqa: PLC0415 (imports vLLM)

    if Path("/dev/nvidiactl").exists():
        pytest.skip("needs a machine without a GPU")
    assert not start_method.driver_is_initialized()


def test_threads_of_grpc_are_seen() -> None:
    """Its library waits in a forked child for threads that stayed behind."""
    pytest.importorskip("grpc")
    done = subprocess.run(
        [sys.executable, "-c", GRPC_AT_WORK], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == "['', 'gRPC']"


@pytest.mark.parametrize("letters", [10, 80])
def test_sockets_have_a_path_that_is_short_enough(
    letters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a long TMPDIR the kernel refuses them, after everything was fetched and imported."""
    from lmi_vllm.engine.vllm.start import SOCKETS_FOLDER, _sockets_in  # noqa: PLC0415 (imports vLLM)

    monkeypatch.delenv(SOCKETS_FOLDER, raising=False)
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as short:
        long = Path(short) / ("x" * letters)
        long.mkdir()
        with new_private_folder("lmi-vllm-engine-", long, notes_in=tmp_path) as folder:
            assert folder.notes is not None
            with _sockets_in(folder):
                expected = folder if letters == 10 else folder.notes
                assert os.environ[SOCKETS_FOLDER] == str(expected.path)
            assert SOCKETS_FOLDER not in os.environ
