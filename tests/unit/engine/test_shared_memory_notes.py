"""Memory that an engine's processes share is noted while the engine starts."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_vllm.engine.vllm.engine_processes import noting_shared_memory, shared_memory_of
from lmi_vllm.private_folders import new_private_folder
from tests.support.fetching import wait_until

# A grandchild has the memory, as a worker below an engine core.
SHARES = """
import subprocess, sys
code = (
    "from multiprocessing.shared_memory import SharedMemory\\n"
    "memory = SharedMemory(create=True, size=8); print(memory.name, flush=True); input()\\n"
    "memory.close(); memory.unlink()"
)
subprocess.run([sys.executable, "-c", code])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_start_that_is_killed_can_be_found(tmp_path: Path) -> None:
    """Weights take minutes to load, and the OOM killer comes then."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        new_private_folder("lmi-vllm-engine-", tmp_path) as folder,
        noting_shared_memory(folder, 0.05),
        subprocess.Popen([sys.executable, "-c", SHARES], **pipes) as child,  # type: ignore[call-overload]
    ):
        name = child.stdout.readline().strip()
        noted = folder.path / ".outside"
        wait_until(lambda: noted.exists() and f"/dev/shm/{name}" in noted.read_text().splitlines())
        child.communicate("\n")


@pytest.mark.parametrize(("method", "is_named"), [("spawn", True), ("fork", False)])
def test_semaphores_are_found_that_have_a_name(method: str, is_named: bool) -> None:
    """Of a process that is no fork of its parent: others have been removed while they are used."""
    before = shared_memory_of([os.getpid()])
    lock = multiprocessing.get_context(method).Lock()
    found = shared_memory_of([os.getpid()]) - before
    assert len(found) == is_named, lock
    assert all(name.startswith("/dev/shm/sem.mp-") for name in found)
