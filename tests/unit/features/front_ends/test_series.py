"""Series of several front-end processes: sums, and nothing lost when one of them ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, subprocess, sys
from prometheus_client import generate_latest
from lmi_vllm.telemetry import metrics
from lmi_vllm.features.front_ends.series import OTHER_PROCESSES, forget_process, remove_files
from lmi_vllm.features.front_ends.series import series_of_all as series

def count(number):
    metrics.GENERATED_TOKENS.labels("base").inc(number)
    metrics.REQUEST_SECONDS.labels("lmi").observe(0.2)

if len(sys.argv) > 1:
    count(5)
    print("counted", flush=True)
    sys.stdin.read()
    sys.exit()
count(2)
metrics.IN_FLIGHT.set(9)
other = subprocess.Popen(
    [sys.executable, __file__, "other"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
other.stdout.readline()
name = "process_resident_memory_bytes"
def memory(name=name):
    return {s.name: s.value for m in series([name]).collect() for s in m.samples}
alone = memory()
OTHER_PROCESSES.add(other.pid)
both = memory()
assert list(both) == [name] and both[name] > 1.2 * alone[name], (alone, both)
cpu = "process_cpu_seconds_total"
before = memory(cpu)[cpu]
other.communicate("")
forget_process(other.pid)
assert memory(cpu)[cpu] >= before, (before, memory(cpu))
assert memory(name)[name] < both[name]
text = generate_latest(series()).decode()
assert 'lmi_generated_tokens_total{adapter="base"} 7.0' in text, text
assert 'lmi_request_duration_seconds_count{dialect="lmi"} 2.0' in text
assert "lmi_requests_in_flight 9.0" in text
assert "pid=" not in text
picked = generate_latest(series(["lmi_requests_in_flight"])).decode()
assert "lmi_requests_in_flight 9.0" in picked and "lmi_generated" not in picked
folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
for number in range(3000):  # beyond the first size of a file
    metrics.GENERATED_TOKENS.labels(f"adapter-{number}").inc()
sizes = [os.stat(os.path.join(folder, name)) for name in os.listdir(folder)]
assert len(sizes) > 2 and max(size.st_size for size in sizes) > 600_000, sizes
assert all(size.st_blocks * 512 >= size.st_size for size in sizes), sizes  # no holes: SIGBUS
remove_files()
assert not os.path.exists(folder)
"""


def test_series_of_two_processes_add_up(tmp_path: Path) -> None:
    """Counters and histograms of both, gauges by their last writer, memory of running ones.

    In processes of its own: prometheus_client decides at its import how it counts.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    folder = tmp_path / "metrics"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(script)],
        env={"PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


FULL = """
import errno, os, sys
fails_after = int(sys.argv[1])
calls, really = [], os.posix_fallocate
def fill(*given):
    calls.append(given)
    if len(calls) > fails_after:
        raise OSError(errno.ENOSPC, "No space left on device")
    really(*given)
os.posix_fallocate = fill
from lmi_vllm.telemetry import metrics
from lmi_vllm.features.front_ends.series import series_of_all
from prometheus_client import generate_latest
for number in range(5000):
    metrics.GENERATED_TOKENS.labels(f"adapter-{number}").inc(number)
assert metrics.GENERATED_TOKENS.labels("adapter-4999")._value.get() == 4999
assert metrics.GENERATED_TOKENS.labels("adapter-1")._value.get() == 1
metrics.IN_FLIGHT.set(3)
generate_latest(series_of_all())
for name in os.listdir(os.environ["PROMETHEUS_MULTIPROC_DIR"]):
    size = os.stat(os.path.join(os.environ["PROMETHEUS_MULTIPROC_DIR"], name))
    assert size.st_blocks * 512 >= size.st_size, name
"""


@pytest.mark.parametrize("fails_after", ["0", "2"])
def test_a_full_disk_ends_nothing(tmp_path: Path, fails_after: str) -> None:
    """From the first file on, or once one grows: values stay in memory, and one line says so."""
    script = tmp_path / "script.py"
    script.write_text(FULL, encoding="utf-8")
    folder = tmp_path / "metrics"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), fails_after],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "has no room (No space left on device): /metrics lacks values" in done.stderr
