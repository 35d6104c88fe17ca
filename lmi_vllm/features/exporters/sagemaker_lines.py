"""The telemetry file that SageMaker names in SM_TELEMETRY_LOG_REV_2022_12.

What begins with one of four tags in the log, `Tag: metric name: value unit`, is appended to it as
`Tag.Count:<n>|#lmi_vllm:<version>,<MetricName>:<value> <unit>`.
"""

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Final

from lmi_vllm._version import __version__
from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.errors import Fault
from lmi_vllm.features.exporters.emf import MetricLines
from lmi_vllm.telemetry.records import RequestSummary

logger = logging.getLogger(__name__)

_NO_DESCRIPTOR: Final = -1
VARIABLE: Final = "SM_TELEMETRY_LOG_REV_2022_12"
TAGS: Final = ("ModelServerError", "UserScriptError", "SysHealth", "ModelServerTelemetry")
_TAGGED: Final = re.compile(rf"({'|'.join(TAGS)}):")
_LINE: Final = re.compile(
    rf"({'|'.join(TAGS)}): *([A-Za-z][\w ]*?) *: *(-?\d+(?:\.\d+)?) +([A-Za-z%/]+)\s*"
)
# The telemetry line by fault.
_FAULTS: Final = {
    Fault.CUSTOM_CODE: "UserScriptError: custom code failure: 1 count",
    Fault.ENGINE: "ModelServerError: engine failure: 1 count",
    Fault.DEADLINE: "ModelServerError: deadline exceeded: 1 count",
}


class SageMakerSettings(FeatureSettings):
    """The file that SageMaker names."""

    # fmt: off
    sm_telemetry_log_rev_2022_12: str | None = variable(parse.any_text,
        "File to which telemetry lines are appended; SageMaker sets it.", values="path")
    # fmt: on


class FileLines(MetricLines):
    """Appends lines to a file on a thread: a disk that stalls, or a pipe, holds up no request."""

    def __init__(self, path: Path) -> None:
        super().__init__(_NO_DESCRIPTOR, f"{VARIABLE} {path}")
        self._path = path
        self._lost = 0  # since the file could be written

    def put(self, block: bytes) -> None:
        """Append whole lines.

        Raises:
            OSError: the file cannot be written now; the log says so once.
        """
        try:
            with self._path.open("ab") as file:
                file.write(block)
        except OSError as error:
            if not self._lost:
                logger.warning("%s: %s; lines are dropped until it can be written", self._name,
                               error.strerror)  # fmt: skip
            self._lost += block.count(b"\n")
            raise
        lost, self._lost = self._lost, 0
        if lost:
            self.notice(lost)


class TelemetryFile(logging.Handler):
    """Appends tagged records; malformed ones are dropped with a warning."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._lines = FileLines(path)
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Append a tagged record."""
        text = record.getMessage()
        if _TAGGED.match(text):
            self.report(text)

    def flush(self) -> None:
        """Wait until all lines are written, but not for long."""
        self._lines.flush()

    def observe(self, summary: RequestSummary) -> None:
        """Append a line for a request that failed by a fault of the server or of user code."""
        if (text := failure_line(summary)) is not None:
            self.report(text)

    def report(self, text: str) -> None:
        """Append one line, unless it is malformed."""
        match = _LINE.fullmatch(text)
        if match is None:
            logger.warning("dropped from telemetry, not `Tag: name: value unit`: %.200s", text)
            return
        tag, words, value, unit = match.groups()
        name = "".join(word[0].upper() + word[1:] for word in words.split())
        self._counts[name] += 1
        line = f"{tag}.Count:{self._counts[name]}|#lmi_vllm:{__version__},{name}:{value} {unit}"
        self._lines.write(line)


def failure_line(summary: RequestSummary) -> str | None:
    """Return the telemetry line of a request that failed by a server or custom code fault."""
    return None if summary.fault is None else _FAULTS.get(summary.fault)
