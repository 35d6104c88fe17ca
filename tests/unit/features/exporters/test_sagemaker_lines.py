"""SageMaker's telemetry file: which records get into it, and in which form."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_vllm._version import __version__
from lmi_vllm.errors import Fault
from lmi_vllm.features.exporters.emf import MetricLines
from lmi_vllm.features.exporters.sagemaker_lines import TelemetryFile
from lmi_vllm.features.metrics import DROPPED_METRIC_LINES
from tests.unit.conftest import Ended


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[TelemetryFile]:
    """A file that is told of every record."""
    handler = TelemetryFile(tmp_path / "telemetry")
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def test_tagged_records_are_appended_with_their_count(
    telemetry: TelemetryFile, tmp_path: Path
) -> None:
    """Words become one name; each name has its own count; other records stay out."""
    for text in (
        "UserScriptError: bad input: 1 count",
        "SysHealth: gpu memory used: 81.5 Percent",
        "an ordinary line: 1 count",
        "UserScriptError: bad input: 2 count",
    ):
        logging.getLogger("users.model").warning("%s", text)
    telemetry.flush()
    head = f"#lmi_vllm:{__version__}"
    assert (tmp_path / "telemetry").read_text() == (
        f"UserScriptError.Count:1|{head},BadInput:1 count\n"
        f"SysHealth.Count:1|{head},GpuMemoryUsed:81.5 Percent\n"
        f"UserScriptError.Count:2|{head},BadInput:2 count\n"
    )


def dropped_lines() -> float:
    """Return the metric."""
    [family] = DROPPED_METRIC_LINES.collect()
    return next(each.value for each in family.samples if each.name.endswith("_total"))


@pytest.mark.parametrize(
    "text",
    [
        "ModelServerError: out of memory",
        "ModelServerError: x: many count",
        "ModelServerError: x: 1",
        "ModelServerTelemetry: x: 1 count\nSysHealth: forged: 1 count",
    ],
    ids=["no value", "no number", "no unit", "two lines"],
)
def test_malformed_records_are_dropped_with_a_warning(
    telemetry: TelemetryFile, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """One warning each; nothing in the file."""
    logging.getLogger("users.model").warning("%s", text)
    telemetry.flush()
    assert not (tmp_path / "telemetry").exists()
    assert "dropped from telemetry" in caplog.text


def test_server_faults_are_written_as_telemetry_lines(
    telemetry: TelemetryFile, tmp_path: Path, ended: Ended
) -> None:
    """And those that user code broke; a client's own mistakes are not."""
    for fault in (Fault.ENGINE, Fault.CUSTOM_CODE, Fault.CLIENT, Fault.OVERLOAD, None):
        telemetry.observe(ended(500, fault=fault))
    telemetry.flush()
    lines = (tmp_path / "telemetry").read_text().splitlines()
    assert [line.split("|")[0] for line in lines] == [
        "ModelServerError.Count:1",
        "UserScriptError.Count:1",
    ]


def test_lines_that_cannot_be_written_are_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning when it begins, one with their number when the file can be written again."""
    before = dropped_lines()
    handler = TelemetryFile(tmp_path / "missing" / "telemetry")
    for _ in range(3):
        handler.report("SysHealth: a: 1 count")
        handler.flush()
    assert caplog.text.count("No such file or directory; lines are dropped until") == 1
    assert dropped_lines() == before + 3
    (tmp_path / "missing").mkdir()
    handler.report("SysHealth: a: 1 count")
    handler.flush()
    assert (tmp_path / "missing" / "telemetry").read_text().startswith("SysHealth.Count:4|")
    assert "3 lines were dropped" in caplog.text
    assert dropped_lines() == before + 3


def _filled(descriptor: int) -> int:
    """Fill a pipe, so that the next write waits; return how much it took."""
    os.set_blocking(descriptor, False)
    filler = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filler += os.write(descriptor, b"-" * 4096)
    os.set_blocking(descriptor, True)
    return filler


def test_lines_beyond_the_queue_are_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe that nothing reads, then a reader: it gets what waited, the log what is missing."""
    before = dropped_lines()
    reading, writing = os.pipe()
    filler = _filled(writing)
    lines = MetricLines(writing, "LMI_METRICS_EMF", most_bytes=1000)
    line, count = "x" * 99, 0
    while dropped_lines() < before + 2:
        lines.write(line)
        count += 1
    wanted = count - 2
    assert "were dropped" not in caplog.text
    with os.fdopen(reading) as reader:
        assert reader.read(filler) == "-" * filler
        assert [reader.readline() for _ in range(wanted)] == [f"{line}\n"] * wanted
        lines.flush()
        assert "LMI_METRICS_EMF: 2 lines were dropped" in caplog.text
        os.close(writing)
        assert reader.read() == ""


def test_unread_pipe_does_not_block(tmp_path: Path) -> None:
    """A pipe without a reader: the line waits on its thread, and comes when there is one."""
    os.mkfifo(tmp_path / "pipe")
    handler = TelemetryFile(tmp_path / "pipe")
    reporting = threading.Thread(target=handler.report, args=("SysHealth: a: 1 count",))
    reporting.daemon = True
    reporting.start()
    reporting.join(5)
    has_returned = not reporting.is_alive()
    with (tmp_path / "pipe").open() as reader:
        assert has_returned
        assert reader.readline().startswith("SysHealth.Count:1|")
