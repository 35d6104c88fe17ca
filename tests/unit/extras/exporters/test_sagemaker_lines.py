"""SageMaker's telemetry file: which records get into it, and in which form."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_vllm._version import __version__
from lmi_vllm.errors import Fault
from lmi_vllm.extras.exporters.sagemaker_lines import TelemetryFile
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
    head = f"#lmi_vllm:{__version__}"
    assert (tmp_path / "telemetry").read_text() == (
        f"UserScriptError.Count:1|{head},BadInput:1 count\n"
        f"SysHealth.Count:1|{head},GpuMemoryUsed:81.5 Percent\n"
        f"UserScriptError.Count:2|{head},BadInput:2 count\n"
    )


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
    assert not (tmp_path / "telemetry").exists()
    assert "dropped from telemetry" in caplog.text


def test_server_faults_are_written_as_telemetry_lines(
    telemetry: TelemetryFile, tmp_path: Path, ended: Ended
) -> None:
    """And those that user code broke; a client's own mistakes are not."""
    for fault in (Fault.ENGINE, Fault.CUSTOM_CODE, Fault.CLIENT, Fault.OVERLOAD, None):
        telemetry.observe(ended(500, fault=fault))
    lines = (tmp_path / "telemetry").read_text().splitlines()
    assert [line.split("|")[0] for line in lines] == [
        "ModelServerError.Count:1",
        "UserScriptError.Count:1",
    ]


def test_a_file_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ended: Ended
) -> None:
    """And no request fails of it."""
    handler = TelemetryFile(tmp_path / "missing" / "telemetry")
    logging.getLogger().addHandler(handler)
    logging.getLogger("users.model").warning("SysHealth: a: 1 count")
    assert handler not in logging.getLogger().handlers
    assert "No such file or directory; no more telemetry" in caplog.text
