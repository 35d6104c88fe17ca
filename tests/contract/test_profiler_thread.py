"""A profiler that one thread starts, and another one stops."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from vllm.config.profiler import ProfilerConfig
from vllm.profiler import wrapper
from lmi_vllm.engine.vllm.workarounds.profiler_thread import OneThread

config = ProfilerConfig(profiler="torch", torch_profiler_dir=sys.argv[1])
if hasattr(wrapper, "create_frontend_profiler"):
    profiler = wrapper.create_frontend_profiler(config, worker_name="front")
else:  # 0.31
    profiler = wrapper.TorchProfilerWrapper(
        config, worker_name="front", local_rank=0, activities=["CPU"]
    )
if sys.argv[2] == "ours":
    profiler = OneThread(profiler)
if hasattr(profiler, "set_output_name"):
    profiler.set_output_name("front")
for call in (profiler.start, profiler.stop):
    ThreadPoolExecutor(1).submit(call).result()
"""


def profile(folder: Path, kind: str) -> int:
    """Start it in one thread and stop it in another; return the exit code of the process."""
    command = [sys.executable, "-c", PROGRAM, str(folder), kind]
    return subprocess.run(command, capture_output=True, check=False, timeout=300).returncode


def test_plain_profiler_ends_the_process_of_two_threads(tmp_path: Path) -> None:
    """The reason for `workarounds/profiler_thread.py`, which may go once this fails."""
    assert profile(tmp_path, "plain") == -signal.SIGSEGV


def test_profiler_of_one_thread_writes_its_trace(tmp_path: Path) -> None:
    """Whichever thread calls."""
    assert profile(tmp_path, "ours") == 0
    assert [*tmp_path.rglob("*.json*")]
