"""Every line of the log in one format: ours, vLLM's, and those of the engine's own process."""

import json
import os
import re
import select
import signal
import subprocess
import sys

import pytest

from integration.client import call, wait_until
from integration.conftest import RunningServer, StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR

RAW = "[W"  # written past Python's logging by torch's C++ part


def test_lines_are_json_without_a_terminal(demo_server: RunningServer) -> None:
    """Also those of the engine's process; the start is one line with everything in it."""
    server = demo_server.process
    others = [line for line in server.stderr.splitlines() if not line.startswith('{"time":')]
    assert all(line.startswith(RAW) for line in others), others
    loggers = {line["logger"].split(".")[0] for line in server.log}
    assert {"lmi_vllm", "vllm"} <= loggers
    ours = server.process.pid
    assert {line["pid"] for line in server.log} > {ours}, "no line of the engine's process"
    (start,) = [line for line in server.log if "source_origin" in line]
    assert start["source_origin"] == "--demo"
    assert start["engine_arguments"]["max_num_seqs"]["origin"].endswith("serving.properties line 4")
    assert list(start["phase_seconds"]) == [
        "settings", "download", "engine", "adapters", "warm-up",
    ]  # fmt: skip
    # From the server's process, which the tests fork with vLLM imported, then from the engine's.
    assert list(start["step_seconds"]) == [
        "configuration", "set-up", "weights", "profile", "KV cache", "application",
    ]  # fmt: skip
    assert sum(start["step_seconds"].values()) <= start["phase_seconds"]["engine"] + 1
    figures = start["step_figures"]
    assert figures["weight_files"] == figures["weight_files_total"] == 1
    size = (DEMO_MODEL_DIR / "model.safetensors").stat().st_size
    assert figures["weight_bytes"] == figures["weight_bytes_total"] == size
    assert figures["kv_cache_tokens"] > 1000
    # A sleep or a restart has steps of its own: other tests ask this server, too.
    steps = [line["step"] for line in server.log[: server.log.index(start)] if "step" in line]
    assert steps == list(start["step_seconds"])
    assert start["adapters"] == ["capitals", "json"]
    assert start["curl"].startswith(f"curl -s {demo_server.url}/invocations")


def test_engine_logs_its_throughput(demo_server: RunningServer) -> None:
    """LMI_STATS_INTERVAL: vLLM's own line, after the traffic of the last seconds."""
    url, server = demo_server.url, demo_server.process
    assert call(url, "/invocations", {"inputs": "The sea", "parameters": {}}).status == 200

    def lines() -> list[str]:
        return [line["message"] for line in server.log if "throughput" in str(line["message"])]

    assert wait_until(lambda: lines()[-1:] != [], 25)
    assert "Avg generation throughput: " in lines()[0]
    assert "Running: " in lines()[0]


def test_text_is_for_people(server_process: StartServer) -> None:
    """With LMI_LOG_FORMAT=text; the summary of the start is a screen of at most 24 lines."""
    server = server_process(
        "--demo", "--port", "0", "--engine", "scripted", environ={"LMI_LOG_FORMAT": "text"}
    )
    url = server.url_when_ready(20)
    assert server.wait_for_line("Try: ").startswith(f"Try: curl -s {url}/invocations")
    lines = server.stderr.splitlines()
    (first,) = [number for number, line in enumerate(lines) if "lmi_vllm 0." in line]
    screen = [lines[first], *(line for line in lines[first + 1 :] if line.startswith("  "))]
    assert 5 < len(screen) <= 24
    assert "max_num_seqs" in str(screen)
    assert not server.log


def test_the_level_is_changed_while_it_runs(shared_scripted_server: RunningServer) -> None:
    """To errors only, and back."""
    url, server = shared_scripted_server.url, shared_scripted_server.process
    assert call(url, "/server/logging?level=error", b"", method="POST").status == 200
    call(url, "/models?limit=11")
    assert call(url, "/server/logging?level=info", b"", method="POST").status == 200
    call(url, "/models?limit=12")
    assert wait_until(lambda: "limit=12" in server.stderr, 5)
    assert "limit=11" not in server.stderr
    assert json.loads(call(url, "/models?limit=1").body)["models"]


def test_a_terminal_has_a_line_that_moves_then_the_address_last() -> None:
    """A start draws over itself; `Ready` is green, and the command and the console follow it."""
    screen, code = on_a_terminal({})
    moving = re.findall(r"\r\x1b\[K[-/|\\] model: (.+?)\r", screen)
    assert moving, screen
    assert "starting the engine" not in screen
    end = screen.partition("\x1b[1;32mReady on http://")[2].splitlines()
    assert end[1].endswith("/invocations \\")
    assert [line.strip()[:3] for line in end[2:4]] == ["-H ", "-d "]
    assert end[4].strip().startswith("Console on http://")
    assert max(map(len, end[1:5])) < 80
    assert "ended: no request came" in screen.splitlines()[-1]
    assert code == 0


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_is_not_drawn_on_has_plain_lines(environ: dict[str, str]) -> None:
    """Nothing is drawn, and what a start does is in lines."""
    screen, _ = on_a_terminal(environ)
    assert "\x1b" not in screen
    assert "\nReady on http://" in screen.replace("\r", "")


def on_a_terminal(environ: dict[str, str]) -> tuple[str, int]:
    """Return what a server with the scripted engine shows until Ctrl-C, and its exit code."""
    ours, its = os.openpty()
    command = [sys.executable, "-m", "lmi_vllm", "serve", "--demo", "--engine", "scripted"]
    process = subprocess.Popen(
        [*command, "--port", "0"], stdin=its, stdout=its, stderr=its,
        env={**os.environ, "TERM": "xterm", **environ},
    )  # fmt: skip
    os.close(its)
    shown, is_told = b"", False
    try:
        while block := _read(ours):
            shown += block
            if not is_told and b"  Console on" in shown.partition(b"Ready on")[2]:
                process.send_signal(signal.SIGINT)
                is_told = True
        return shown.decode(), process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read(descriptor: int) -> bytes:
    ready, _, _ = select.select([descriptor], [], [], 60)
    assert ready, "nothing was shown for a minute"
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other side is closed
        return b""
