"""When the engine's process is forked and when it is spawned; that it works is the suites' affair.

What only a GPU shows is in integration/gpu (`forked engine`).
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmi_vllm.messages import EngineArguments
from lmi_vllm.private_folders import new_private_folder

pytestmark = pytest.mark.vllm

# The one call of the driver that is asked, with CUDA_ERROR_NOT_INITIALIZED, or CUDA_SUCCESS.
DRIVER = "int cuCtxGetCurrent(void **context) { *context = 0; return %d; }"
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


@pytest.mark.parametrize(
    ("reason", "set_by_user", "method"),
    [
        ("", None, "fork"),
        ("CUDA is initialised", None, "spawn"),
        ("", "spawn", "spawn"),
        ("CUDA is initialised", "fork", "fork"),
    ],
)
def test_engine_is_forked_unless_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, reason: str, set_by_user: str | None, method: str
) -> None:
    """What the operator sets counts; vLLM spawns by itself where CUDA is initialised."""
    from lmi_vllm.engine.vllm import start  # noqa: PLC0415 (imports vLLM)

    monkeypatch.setenv(start.START_METHOD, "spawn")  # as vLLM leaves it on a CPU
    monkeypatch.setattr(start, "CONFIGURED_METHOD", set_by_user)
    monkeypatch.setattr(start, "why_spawned", lambda *_, **__: reason)
    start._choose_start_method(EngineArguments({}), is_cpu=False)
    assert os.environ[start.START_METHOD] == method


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
