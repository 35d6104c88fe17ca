"""A log agent that stalls: the server goes on, says afterwards what is missing, and can end."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from integration.client import call, wait_until
from integration.conftest import clean_environment
from integration.forked_server import ForkedProcess

FULL_PIPE_SECONDS = 12.0  # of a line each 0.05 s: several times what a pipe holds
REQUESTS = 1600  # lines of 0.8 KiB: more than the pipe's 64 KiB and the queue's 1 MiB


Process = ForkedProcess | subprocess.Popen[str]


def end(process: Process) -> None:
    """Kill what still runs."""
    process.kill()
    process.wait(30)
    if process.stdout is not None:
        process.stdout.close()


def forked(stderr: int, **environ: str) -> ForkedProcess:
    """Start a server on the real engine, whose log goes there."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    arguments = ["serve", "--demo", "--port", "0"]
    return ForkedProcess(arguments, clean_environment() | environ, stderr)


def scripted(stderr: int) -> "subprocess.Popen[str]":
    """Start a server on the scripted engine, whose log goes there."""
    command = [sys.executable, "-m", "lmi_vllm", "serve", "--demo", "--port", "0"]
    return subprocess.Popen(
        [*command, "--engine", "scripted"], stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def listening(process: Process) -> str:
    """Return the address on which the server listens."""
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith("Listening on ")).split()[-1]


@pytest.mark.parametrize("engine", ["scripted", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_serving_with_a_stalled_log_reader(engine: str) -> None:
    """Health and streams answer throughout; then the lines come, and one that counts the rest."""
    reading, writing = os.pipe()
    process = forked(writing) if engine == "vllm" else scripted(writing)
    os.close(writing)
    try:
        url = listening(process)
        # Read during the start: what torch's C++ writes there goes past Python's logging.
        assert wait_until(lambda: drained(reading) and call(url, "/ping").status == 200, 120)
        for number in range(REQUESTS):
            assert call(url, f"/models?{'x' * 300}={number}", seconds=10).status == 200
        assert call(url, "/ping", seconds=10).status == 200
        # Xgrammar warns of this one, on the event loop, past Python's logging.
        bound = {"guided_json": {"type": "string", "pattern": "(^a|b)"}} if engine == "vllm" else {}
        asked = {"inputs": "x", "stream": True, "parameters": bound}
        assert call(url, "/invocations", asked, seconds=60).status == 200
        assert call(url, "/ping", seconds=10).status == 200
        dropped = counted(url)
        assert dropped > 0
        found = bytearray()
        threading.Thread(target=read_all, args=(reading, found), daemon=True).start()
        assert wait_until(lambda: b"lines of the log were dropped" in found, 20)
        notices = re.findall(rb'"message":"(\d+) lines of the log were dropped', bytes(found))
        assert sum(map(int, notices)) >= dropped
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        end(process)


@pytest.mark.vllm
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_lines_that_the_engine_drops_are_counted_by_the_server(method: str) -> None:
    """Its process shares stderr, whose pipe its own lines fill; the metric is the server's."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    reading, writing = os.pipe()
    scheduler = {"OPTION_SCHEDULER_CLS": "tests.support.operators_scheduler.TalkativeScheduler"}
    process: Process
    if method == "fork":  # which a CPU has without being told
        process = forked(writing, **scheduler)
    else:
        environ = clean_environment() | scheduler | {"VLLM_WORKER_MULTIPROC_METHOD": method}
        process = subprocess.Popen(
            [sys.executable, "-m", "lmi_vllm", "serve", "--demo", "--port", "0"],
            stdout=subprocess.PIPE, stderr=writing, text=True, env=environ,
        )  # fmt: skip
    os.close(writing)
    try:
        url = listening(process)
        assert wait_until(lambda: drained(reading) and call(url, "/ping").status == 200, 180)
        assert counted(url) == 0
        asked = {"inputs": "x", "parameters": {"max_new_tokens": 7}}  # the scheduler talks
        assert call(url, "/invocations", asked, seconds=60).status == 200
        assert wait_until(lambda: counted(url) > 0, 20)
        found = bytearray()
        threading.Thread(target=read_all, args=(reading, found), daemon=True).start()
        pattern = rb'"pid":(\d+),"message":"(\d+) lines of the log were dropped'
        assert wait_until(lambda: re.search(pattern, found) is not None, 20)
        notices = re.findall(pattern, bytes(found))
        assert {int(pid) for pid, _ in notices}.isdisjoint({process.pid})
        assert 0 < sum(int(lines) for _, lines in notices) <= counted(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        end(process)


def test_shutdown_with_a_stalled_log_reader() -> None:
    """A signal ends it within seconds, with a full pipe."""
    reading, writing = os.pipe()
    process = scripted(writing)
    try:
        url = listening(process)
        assert wait_until(lambda: call(url, "/ping").status == 200, 60)
        fill(writing)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        end(process)
        os.close(writing)
        os.close(reading)


def test_server_starts_and_ends_while_its_stdout_is_not_read() -> None:
    """The lines that scripts wait for go to a pipe that was full before the first of them."""
    reading, writing = full_pipe()
    port = free_port()
    command = [sys.executable, "-m", "lmi_vllm", "serve", "--demo", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--engine", "scripted"], stdout=writing, stderr=subprocess.DEVNULL, text=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        assert wait_until(lambda: is_ready(url), 60)
        assert call(url, "/invocations", {"inputs": "x"}, seconds=10).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        end(process)
        os.close(writing)
        os.close(reading)


def full_pipe() -> tuple[int, int]:
    """Return the ends of a pipe that takes nothing more."""
    reading, writing = os.pipe()
    fill(writing)
    return reading, writing


def fill(writing: int) -> None:
    """Write until a pipe takes nothing more."""
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 1024)
    except BlockingIOError:
        os.set_blocking(writing, True)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def is_ready(url: str) -> bool:
    """Whether the server answers there, and is ready."""
    try:
        return call(url, "/ping", seconds=10).status == 200
    except OSError:
        return False


def test_serving_with_a_stalled_metrics_reader() -> None:
    """Lines for CloudWatch leave by stdout, whose reader may stall as well."""
    environ = {**os.environ, "LMI_METRICS_EMF": "true", "LMI_METRICS_EMF_INTERVAL": "0.05"}
    command = [sys.executable, "-m", "lmi_vllm", "serve", "--demo", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--engine", "scripted"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ,
    )  # fmt: skip
    try:
        url = listening(process)
        assert wait_until(lambda: call(url, "/ping").status == 200, 60)
        body = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
        until = time.monotonic() + FULL_PIPE_SECONDS
        while time.monotonic() < until:
            assert call(url, "/invocations", body, seconds=10).status == 200
            time.sleep(0.02)  # leaves the processor to other tests
        assert call(url, "/invocations", {**body, "stream": True}, seconds=20).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        end(process)


def counted(url: str) -> float:
    """Return how many lines the server says it has dropped."""
    text = call(url, "/metrics").body.decode()
    found = re.search(r"^lmi_log_lines_dropped_total ([0-9.e+]+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def drained(descriptor: int) -> bool:
    """Read what is there by now."""
    while select.select([descriptor], [], [], 0)[0]:
        os.read(descriptor, 65536)
    return True


def read_all(descriptor: int, found: bytearray) -> None:
    """Read what comes until the end."""
    while data := os.read(descriptor, 65536):
        found.extend(data)
    os.close(descriptor)
