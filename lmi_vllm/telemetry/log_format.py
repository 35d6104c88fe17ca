"""One format for every line of the log, vLLM's included: text for people, or JSON."""

import functools
import importlib
import inspect
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

import orjson

from lmi_vllm.telemetry.log_handler import (
    CLEAR,
    QueuedHandler,
    drop_what_waits,
    ignore_dropped,
)

Format = Literal["text", "json"]

_STDERR: Final = 2
BAR_SECONDS: Final = 10  # between two lines of a progress bar; a shorter one has none
_UP: Final = "\x1b[A"  # written by a bar below another one
TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"


Mask = Callable[[str], str]


def no_mask(text: str) -> str:
    """Return `text` unchanged: a mask that hides nothing."""
    return text


# What moves a terminal's cursor, reverses text or ends a line; a tab does not.
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class TextFormatter(logging.Formatter):
    """Formats lines for people; texts of clients cannot look like lines of their own."""

    def __init__(self, mask: Mask = no_mask) -> None:
        super().__init__(TEXT)
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        text = _CONTROLS.sub(_escaped, self._mask(super().format(record)))
        return text.replace("\n", "\n    ")


class TerminalFormatter(TextFormatter):
    """Formats lines that replace what was drawn where they begin."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return CLEAR + super().format(record)


def _escaped(control: re.Match[str]) -> str:
    return control[0].encode("unicode_escape").decode("ascii")


class JsonFormatter(logging.Formatter):
    """Formats each line as a JSON object; a record's `fields` are beside its message."""

    def __init__(self, mask: Mask = no_mask) -> None:
        super().__init__()
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        created = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": created.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z",
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": self._mask(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = self._mask(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line = {**line, **fields, **line}  # ours first, and never replaced
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def chosen_format(asked: str, stream: TextIO) -> Format:
    """Return the format of LMI_LOG_FORMAT; `auto` is text on a terminal and JSON elsewhere."""
    if asked == "text" or (asked == "auto" and stream.isatty()):
        return "text"
    return "json"


class BarLines(io.TextIOBase):
    """Where one progress bar is drawn: a line of the log now and then, and its last state."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._begun = self._said = time.monotonic()
        self._line = ""

    def write(self, text: str) -> int:
        """Take a drawing, or the end of the line after the last one; returns its length."""
        self._line = text.replace(_UP, "").strip() or self._line
        is_over = text == "\n"
        now = time.monotonic()
        if self._line and now - (self._begun if is_over else self._said) >= self._seconds:
            logging.getLogger("tqdm").info("%s", self._line)
            self._said, self._line = now, ""
        return len(text)


@functools.cache
def log_progress_bars(seconds: float = BAR_SECONDS) -> None:
    """Have every progress bar of tqdm on stderr log lines at most so often, and a shorter one none.

    A bar draws over its own line without ending it. The next record of the log would follow on that
    line, and be no JSON.
    """
    bar = importlib.import_module("tqdm.std").tqdm
    plain = bar.__init__
    signature = inspect.signature(plain)

    def __init__(*arguments: object, **named: object) -> None:
        given = signature.bind(*arguments, **named)
        if given.arguments.get("file") in (None, sys.stderr):
            given.arguments |= {"file": BarLines(seconds), "ncols": 0}
            given.arguments |= {"mininterval": seconds, "delay": seconds}
        plain(*given.args, **given.kwargs)

    bar.__init__ = __init__


def configure_logging(
    kind: Format,
    level: int | str,
    mask: Mask = no_mask,
    count_dropped: Callable[[int], None] = ignore_dropped,
    *,
    is_drawn_on: bool = False,
) -> logging.Handler:
    """Send every line of this process to stderr in one format, warnings included.

    `mask` hides secrets, also in libraries' lines: vLLM prints its configuration. On a terminal
    that `is_drawn_on` a line replaces the drawing.
    """
    descriptor = sys.stderr.fileno()
    if descriptor == _STDERR and (kept := drop_what_waits(_STDERR)) != _STDERR:
        descriptor = kept  # for prints, too: they wait, and never fail
        sys.stderr = os.fdopen(kept, "w", 1, "utf-8", errors="backslashreplace", closefd=False)
    handler = QueuedHandler(descriptor, count_dropped)
    people = TerminalFormatter if is_drawn_on else TextFormatter
    handler.setFormatter(JsonFormatter(mask) if kind == "json" else people(mask))
    logging.logThreads = logging.logMultiprocessing = False  # in neither format: saves the look-ups
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    return handler
