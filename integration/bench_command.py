"""`lmi-vllm bench` as its users run it: every dialect, SageMaker with SigV4, errors, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.client import running_requests, wait_until
from integration.conftest import RunningServer, StartServer, clean_environment
from tests.support.sagemaker_proxy import sagemaker_proxy

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
NO_KEYS = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": os.devnull}


def command(*words: str) -> list[str]:
    """Return the command as typed."""
    return [sys.executable, "-m", "lmi_vllm", "bench", *words]


def environment(**more: str) -> dict[str, str]:
    """Return its environment."""
    kept = {name: text for name, text in clean_environment().items() if not name.startswith("AWS_")}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | more


def bench(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run it to its end."""
    return subprocess.run(
        command(*words),
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def figures(*words: str, **environ: str) -> dict[str, Any]:
    """Return its JSON; it has to succeed."""
    done = bench(*words, "--json", "-", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("dialect", ["lmi", "completions", "chat"])
def test_every_dialect_counts_the_engines_tokens(demo_server: RunningServer, dialect: str) -> None:
    """Tokens are exact, whole and streamed; times are in order."""
    words = (demo_server.url, "--dialect", dialect, "-n", "6", "-c", "3", "--ignore-eos")
    # So many that a busy machine, which joins tokens that were not fetched, leaves some apart.
    streamed = figures(*words, "--output-tokens", "60")
    assert (streamed["good"], streamed["output_tokens"]) == (6, 360)
    latency = streamed["latency_milliseconds"]
    assert 0 < latency["time_to_first_token"]["p50"] < latency["end_to_end"]["p50"]
    assert latency["inter_token_latency"]["p50"] > 0
    whole = figures(*words, "--output-tokens", "9", "--no-stream")
    assert (whole["good"], whole["output_tokens"]) == (6, 54)
    assert whole["latency_milliseconds"]["time_to_first_token"] is None


def test_tgi_is_spoken_on_its_own_routes(server_process: StartServer) -> None:
    """Both of them."""
    environ = {"OPTION_TGI_COMPAT": "true"}
    server = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
    url = server.url_when_ready(20)
    for more in ((), ("--no-stream",)):
        found = figures(url, "--dialect", "tgi", "-n", "4", "--output-tokens", "5", *more)
        assert (found["good"], found["output_tokens"]) == (4, 20)


def test_adapters_share_the_load(demo_server: RunningServer, tmp_path: Path) -> None:
    """The table and the document come with them."""
    document = tmp_path / "a.json"
    done = bench(
        demo_server.url, "-n", "12", "--output-tokens", "4-8", "--adapter", "capitals:2",
        "--adapter", "base", "--json", str(document),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in ("12 requests in", "time to first token", "inter-token latency", "capitals"):
        assert word in done.stdout, done.stdout
    adapters = json.loads(document.read_text())["adapters"]
    assert set(adapters) == {"base", "capitals"}


@pytest.mark.parametrize("part_bytes", [None, 37], ids=["by chunk", "cut anywhere"])
def test_sagemaker_is_asked_with_signatures(
    demo_server: RunningServer, part_bytes: int | None
) -> None:
    """Both operations, through a proxy that speaks its protocol and wants SigV4."""
    with sagemaker_proxy(demo_server.url, part_bytes) as proxy:
        words = ("--sagemaker", "demo", "--region", "eu-west-1", "--endpoint-url", proxy)
        words += ("-n", "4", "-c", "2", "--output-tokens", "7", "--ignore-eos")
        for more in ((), ("--no-stream",), ("--dialect", "chat")):
            found = figures(*words, *more, **KEYS)
            assert (found["good"], found["output_tokens"]) == (4, 28), more
        refused = bench(*words, "--adapter", "missing", **KEYS)
        assert refused.returncode == 1
        assert "ModelError 424" in refused.stderr
        assert "adapter missing was not found" in refused.stderr
        without = bench(*words, **NO_KEYS)
        assert "no AWS credentials" in without.stderr


def test_errors_are_counted_by_kind(server_process: StartServer) -> None:
    """What the server refuses is counted beside what it answers; the code says if any was good."""
    environ = {"SERVING_JOB_QUEUE_SIZE": "1", "LMI_SCRIPTED_SECONDS_PER_TOKEN": "0.05"}
    server = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
    url = server.url_when_ready(20)
    found = figures(url, "-n", "30", "-c", "4", "--output-tokens", "3")
    assert found["good"] >= 1
    assert found["errors"]["HTTP 503"]["count"] == found["failed"] > 0
    assert "Worker queue capacity exceeded" in found["errors"]["HTTP 503"]["example"]
    slow = bench(url, "-n", "2", "--timeout", "0.2", "--no-probe")
    assert (slow.returncode, "timeout: no whole answer within 0.2 s" in slow.stdout) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give either a URL or --sagemaker ENDPOINT"),
        (("http://127.0.0.1:9",), "the first request failed: cannot connect"),
        (("127.0.0.1:9",), "a URL begins with http://"),
        (("http://h", "--rate", "0"), "expected a number above 0 (got 0)"),
        (("http://h", "--output-tokens", "9-3"), "1 <= N <= M (got 9-3)"),
        (("http://h", "--adapter", "a:x"), "a weight is a number above 0"),
        (("http://h", "--prompts", "/nowhere"), "--prompts /nowhere: No such file"),
        (("http://h", "--header", "x"), "--header is NAME:VALUE"),
    ],
    ids=["nothing", "no server", "no URL", "rate", "span", "weight", "file", "header"],
)
def test_a_mistake_is_one_clear_error(words: tuple[str, ...], said: str) -> None:
    """Before any load, without a trace."""
    done = bench(*words)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interruption_prints_the_table(demo_server: RunningServer) -> None:
    """Of what was done by then; the server is left without any work."""
    words = (demo_server.url, "-n", "5000", "-c", "4", "--output-tokens", "20", "--ignore-eos")
    process = subprocess.Popen(
        command(*words),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "done, 4 in flight" in process.stderr.readline()  # plain lines where no terminal is
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "cut off by the interruption" in printed
    assert "time to first token" in printed
    assert wait_until(lambda: running_requests(demo_server.url) == 0, 10)
