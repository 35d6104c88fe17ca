"""How processes of the engine ended, in words."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.engine.deaths import ENGINE_DIED, OomKills, ended_so, how_ended
from lmi_vllm.engine.vllm.engine_processes import EngineProcesses
from lmi_vllm.engine.vllm.start_failures import start_error_of
from lmi_vllm.errors import EngineMemoryError
from lmi_vllm.messages import EngineArguments

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: pidfd and /proc")
NO_ARGUMENTS = EngineArguments({}, {})


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "killed by SIGKILL"),
        (-6, "killed by SIGABRT"),
        (-45, "killed by signal 45"),
        (3, "exit code 3"),
        (None, ""),
    ],
)
def test_ends_are_named(code: int | None, words: str) -> None:
    """By the signal, or by the exit code."""
    assert how_ended(code) == words


COUNTERS = {
    "version 2, a container": ("0::/\n", "sys/fs/cgroup/memory.events"),
    "version 2, a service": ("0::/lmi.service\n", "sys/fs/cgroup/lmi.service/memory.events"),
    "version 1, a container": ("4:memory:/a\n0::/\n", "sys/fs/cgroup/memory/memory.oom_control"),
    "version 1, a service": ("4:cpu,memory:/a\n", "sys/fs/cgroup/memory/a/memory.oom_control"),
}  # fmt: skip


@pytest.fixture
def container(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A root folder of a container, and the file of its counter."""
    groups, name = request.param
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    counter = tmp_path / name
    counter.parent.mkdir(parents=True)
    counter.write_text("oom 7\noom_kill 2\noom_group_kill 0\n")
    return tmp_path, counter


@pytest.mark.parametrize("container", COUNTERS.values(), ids=COUNTERS, indirect=True)
def test_oom_killer_is_named_where_its_counter_rose(container: tuple[Path, Path]) -> None:
    """What it killed before does not count; another signal than its own is not its work."""
    root, counter = container
    kills = OomKills(root)
    assert kills.words() == ""
    assert ended_so("it died", -9, kills) == "it died: killed by SIGKILL"
    counter.write_text("oom 8\noom_kill 3\noom_group_kill 0\n")
    said = ended_so("it died", -9, kills)
    assert said.startswith("it died: killed by SIGKILL, the kernel's OOM killer ended 1 of")
    assert ended_so("it died", -11, kills) == "it died: killed by SIGSEGV"


@pytest.mark.parametrize("container", [COUNTERS["version 2, a container"]], indirect=True)
def test_what_helps_against_the_oom_killer_is_said(container: tuple[Path, Path]) -> None:
    """The container's limit, and what its owner says when it has come to that."""
    root, counter = container
    (root / "proc/meminfo").write_text("MemTotal: 8388608 kB\n")
    (root / "sys/fs/cgroup/memory.max").write_text(f"{3 << 30}\n")
    (root / "sys/fs/cgroup/memory.current").write_text("1\n")
    kills = OomKills(root, lambda: "lower that")
    counter.write_text("oom_kill 3\n")
    said = "give it more memory than its limit of 3.00 GiB, or lower that"
    assert kills.words().endswith(f"processes: {said}")


def test_a_machine_without_counters_has_no_oom_kills(tmp_path: Path) -> None:
    """macOS, for one."""
    assert OomKills(tmp_path).words() == ""


LOST = RuntimeError("Engine core initialization failed. See root cause above. "
                    "Failed core proc(s): {'EngineCore': -6}")  # fmt: skip


def test_start_names_the_signal_of_an_engine_core() -> None:
    """Where no process of it could write why."""
    error = start_error_of(LOST, None, NO_ARGUMENTS, OomKills(Path("/nowhere")), {})
    expected = "the engine did not start: its process EngineCore ended: killed by SIGABRT"
    assert error.text == expected


def test_start_prefers_what_a_process_has_logged() -> None:
    """An exception that ended it says more than its exit code."""
    error = start_error_of(LOST, "ValueError: x", NO_ARGUMENTS, OomKills(Path("/nowhere")), {})
    assert error.text == "the engine did not start: ValueError: x"


@pytest.mark.parametrize("container", [COUNTERS["version 2, a container"]], indirect=True)
def test_start_that_the_oom_killer_ended_lacks_memory(container: tuple[Path, Path]) -> None:
    """The advice is about the container, not about the device."""
    root, counter = container
    kills = OomKills(root)
    counter.write_text("oom_kill 3\n")
    text = "RuntimeError: its worker VllmWorker-0 was killed by SIGKILL"
    error = start_error_of(ValueError("x"), text, NO_ARGUMENTS, kills, {})
    assert isinstance(error, EngineMemoryError)
    assert "give it more memory" in error.text
    assert "gpu_memory_utilization" not in error.text


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler repeats its command and its warnings: 12,000 characters."""
    disk = SimpleNamespace(free=12_000_000, total=10**9)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)
    environ = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    noise = "vec512_int.h:1232:53: warning: overflow in conversion " * 200
    cause = f"InductorError: g++ {noise} cannot write PCH file: No space left on device {noise}"
    kills = OomKills(Path("/nowhere"))
    error = start_error_of(ValueError("x"), cause, NO_ARGUMENTS, kills, environ)
    start = "the engine did not start: No space left on device: "
    assert error.text.startswith(start)
    assert f"{tmp_path}/vllm (VLLM_CACHE_ROOT) has 12.0 MB free" in error.text
    assert "/dev/shm (shared memory) has 12.0 MB free" in error.text
    assert len(error.text) < 1000
    disk.total = 64 * 1024**2  # a small one that is not full
    assert "MB free" not in start_error_of(ValueError("x"), cause, NO_ARGUMENTS, kills, {}).text


def test_a_long_cause_is_shortened() -> None:
    """Its beginning has the class, its end the reason."""
    cause = f"InductorError: {'x' * 20_000} the reason"
    error = start_error_of(ValueError("x"), cause, NO_ARGUMENTS, OomKills(Path("/nowhere")), {})
    assert error.text.startswith("the engine did not start: InductorError: xxx")
    assert error.text.endswith("xxx the reason")
    assert len(error.text) < 1100


WORKERS = """
for i in 0 1; do bash -c 'exec -a "VLLM::Worker_TP'$i'" sleep 60' & done
bash -c 'exec -a other sleep 60' &
wait
"""


@pytest.fixture
def core() -> Iterator[Any]:
    """A process with two children that are named as vLLM names workers, and another one."""
    process = subprocess.Popen(["bash", "-c", WORKERS], start_new_session=True)
    yield SimpleNamespace(pid=process.pid, exitcode=None)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def watched(core: Any, errors: Path) -> tuple[EngineProcesses, asyncio.Event]:
    """Return the watch over both workers, and what is set when one has ended."""
    ended = asyncio.Event()
    while True:
        found = EngineProcesses([core], OomKills(Path("/nowhere")), errors)
        found.watch(ended.set)
        if len(found._workers) == 2:
            return found, ended
        found.close()
        await asyncio.sleep(0.05)


@ON_LINUX
async def test_end_of_a_worker_is_seen_at_once(core: Any, tmp_path: Path) -> None:
    """It is not this process's child; the engine core tells how it ended, when it comes to it."""
    found, ended = await watched(core, tmp_path / "errors")
    worker = found._workers[1]
    os.kill(worker.pid, signal.SIGKILL)
    await asyncio.wait_for(ended.wait(), 2)
    assert found.has_lost_a_worker
    (tmp_path / "worker-ends").write_text("-9\n")
    name = f"{worker.title}, process {worker.pid}"
    assert await found.reason() == f"a worker of the engine died ({name}): killed by SIGKILL"
    assert not await asyncio.to_thread(found.wait_workers, 0.1)  # the other one runs
    found.close()


@ON_LINUX
async def test_end_of_a_core_is_its_own(core: Any, tmp_path: Path) -> None:
    """Without a lost worker the first exit code of a core counts."""
    found, _ = await watched(core, tmp_path / "errors")
    core.exitcode = -11
    assert await found.reason() == f"{ENGINE_DIED}: killed by SIGSEGV"
    found.close()
    found.close()


@ON_LINUX
async def test_core_that_ends_itself_has_said_why(core: Any, tmp_path: Path) -> None:
    """What it has logged last is the reason; one that is killed has not."""
    errors = tmp_path / "errors"
    errors.write_text("ValueError: before\nAttributeError: no scan\nSee root cause above\n")
    found = EngineProcesses([core], OomKills(Path("/nowhere")), errors)
    core.exitcode = 1
    assert await found.reason() == f"{ENGINE_DIED}: exit code 1: AttributeError: no scan"
    core.exitcode = -9
    assert await found.reason() == f"{ENGINE_DIED}: killed by SIGKILL"
