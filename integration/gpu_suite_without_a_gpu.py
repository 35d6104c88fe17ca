"""The GPU suite without a GPU: its checks of answers pass, the others say what they need.

The whole of it is `make gpu`; here only what one server is enough for.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration import storm
from integration.bench.serving import Load
from integration.gpu import models, speed
from integration.gpu.machine import Machine
from integration.gpu.suite import Suite

ROOT = Path(__file__).parent.parent
CHECKS = (
    "readme requests", "base beside adapters", "log probabilities", "structured output",
    "sleep and wake",
)  # fmt: skip

pytestmark = pytest.mark.vllm


def test_suite_reports_passed_and_skipped_checks(tmp_path: Path) -> None:
    """With one report; the exit code is the number of failures."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    command = [sys.executable, "-m", "integration.gpu", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", ",".join(CHECKS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "none: every check in its CPU form" in report
    for name in CHECKS:
        verdict = "SKIP" if name == "sleep and wake" else "PASS"
        assert f"| {name} | {verdict} |" in report
    assert "needs a GPU: vLLM's sleep mode is for CUDA and HIP" in report
    assert not list(tmp_path.glob("scratch-*"))


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """Return a suite whose machine has a device, which nothing here asks for."""
    return Suite(Machine(("Pretended",), 24 << 30), tmp_path, "8b", {}, 1, idle=1)


def test_run_that_is_cut_reports_and_goes_on_to_no_other_check(suite: Suite) -> None:
    """A call on a lent machine ends at its limit: what was found until then must be there."""
    suite.end_after(0)

    def endless(_: Suite) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return ""

    try:
        for name in ("endless", "next"):
            suite.run(name, endless)
    finally:
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
    found = [(outcome.verdict, outcome.note) for outcome in suite.outcomes]
    assert found == [
        ("FAIL", "cut: the time of the run was over"), ("SKIP", "no time was left")
    ]  # fmt: skip


def test_server_that_does_not_start_leaves_the_figures_of_the_others(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check fails by its name, and the report keeps every row, and the server's own log."""

    def rows_of(suite: Suite, candidate: speed.Candidate, rows: list[list[str]]) -> float:
        if candidate.name == "vllm serve":
            raise SystemExit("the server ended with 1")
        rows.append([candidate.name, "1", "100", "1", "1", "1"])
        return 7.0

    monkeypatch.setattr(speed, "rows_of", rows_of)
    monkeypatch.setattr(suite, "wait_for_memory", lambda: None)
    ours, theirs = (
        speed.Candidate(name, lambda _: [], "/ping", (), {}) for name in ("lmi_vllm", "vllm serve")
    )
    monkeypatch.setattr(speed, "candidates", lambda *_: ([theirs, ours], "no vllm-rs"))
    suite.run("throughput", speed.throughput)
    (outcome,) = suite.outcomes
    assert outcome.verdict == "FAIL"
    assert "vllm serve: SystemExit: the server ended with 1" in outcome.note
    assert [row[0] for _, _, table in suite.tables for row in table] == ["lmi_vllm"] * 2


@pytest.mark.parametrize(("streams", "clients"), [(1, 1), (64, 1), (512, 8)])
def test_hundreds_of_streams_come_from_several_clients(
    monkeypatch: pytest.MonkeyPatch, streams: int, clients: int
) -> None:
    """One client's own processor time would be what is measured."""
    asked: list[int] = []

    def load(_server: object, _dialect: str, share: int, requests: int, tokens: int) -> Load:
        asked.append(share)
        return Load(share, 1.0, 2.0)

    monkeypatch.setattr(speed, "load", load)
    server: Any = SimpleNamespace(process=SimpleNamespace(pid=1))
    spent = iter((0.0, streams * 512 * 5e-6))
    monkeypatch.setattr(speed, "front_ends", lambda server: [server.process])
    monkeypatch.setattr(speed, "spent", lambda _: [next(spent)])
    found, micros = speed.measure(server, "lmi", streams)
    assert found == Load(streams, 1.0, 2.0)
    assert asked == [streams, *[streams // clients] * clients]
    assert micros == pytest.approx(5)


def test_every_token_of_dummy_weights_has_a_text(suite: Suite) -> None:
    """An empty text is no token to a client that waits for the first one."""
    from tokenizers import Tokenizer  # noqa: PLC0415 (comes with vLLM)

    file = models.write_shape(suite) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    count = json.loads((file.parent / "config.json").read_text())["vocab_size"]
    assert tokenizer.get_vocab_size() == count == 128256
    assert tokenizer.decode([1279, 1280, count - 1]).endswith(f" w1280 w{count - 1}")


@pytest.mark.parametrize(
    ("text", "names"),
    [("one two", {"a"}), ("one six", {"a"}), ("ten", {"b"}), ("x", {"a", "b"})],
)
def test_rounded_answer_is_of_the_weights_it_begins_as(text: str, names: set[str]) -> None:
    """On a GPU a token may fall otherwise in a batch; other weights begin otherwise."""
    assert storm.nearest({"a": {"k": "one two"}, "b": {"k": "ten ten"}}, "k", text) == names


def test_unknown_check_is_refused(tmp_path: Path) -> None:
    """With the names there are."""
    command = [sys.executable, "-m", "integration.gpu", "--out", str(tmp_path), "--only", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "sleep and wake" in done.stderr
