"""One format for every line: JSON that parses whatever a record holds, text on a terminal."""

import io
import json
import logging
import sys
from typing import Any

import pytest

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.telemetry.log_format import (
    JsonFormatter,
    TextFormatter,
    chosen_format,
    log_progress_bars,
)


def line(message: str, *arguments: object, **more: Any) -> dict[str, Any]:
    """Return what the formatter makes of a record, parsed."""
    record = logging.LogRecord("a.b", logging.WARNING, "f.py", 1, message, arguments, None)
    record.__dict__.update(more)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def test_a_line_is_one_json_object() -> None:
    """Time in UTC with milliseconds, level, logger, process and the whole message."""
    found = line('two\nlines "%s"', "x", created=0.25)
    assert found["time"] == "1970-01-01T00:00:00.250Z"
    assert (found["level"], found["logger"]) == ("WARNING", "a.b")
    assert found["message"] == 'two\nlines "x"'
    assert found["pid"]


def test_extra_fields_never_replace_the_message() -> None:
    """Values that JSON does not know become text; names of ours stay ours."""
    found = line("m", fields={"tokens": 3, "what": object, 1: "x", "level": "FORGED"})
    assert (found["tokens"], found["level"], found["1"]) == (3, "WARNING", "x")
    assert "object" in found["what"]


def test_an_exception_is_in_its_line() -> None:
    """With its trace, and still one line."""
    try:
        raise ValueError("broken")
    except ValueError:
        found = line("failed", exc_info=sys.exc_info())
    assert found["exception"].endswith("ValueError: broken")
    assert "Traceback" in found["exception"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.mark.parametrize(
    ("asked", "stream", "kind"),
    [
        ("auto", Terminal(), "text"),
        ("auto", io.StringIO(), "json"),
        ("json", Terminal(), "json"),
        ("text", io.StringIO(), "text"),
    ],
    ids=["terminal", "pipe", "json", "text"],
)
def test_auto_is_text_for_people_and_json_for_machines(
    asked: str, stream: io.StringIO, kind: str
) -> None:
    """A word in LMI_LOG_FORMAT wins."""
    assert chosen_format(asked, stream) == kind


@pytest.mark.parametrize("kind", [JsonFormatter, TextFormatter])
def test_no_line_shows_the_login_of_a_url(
    kind: type[JsonFormatter] | type[TextFormatter],
) -> None:
    """From any library, in its message or in the trace of its exception."""
    try:
        raise ValueError("cannot reach https://user:SENTINEL@h/")
    except ValueError:
        record = logging.LogRecord(
            "vllm", logging.INFO, "f.py", 1, "otlp='http://u:SENTINEL@h:1/?sig=SENTINEL'", (),
            sys.exc_info(),
        )  # fmt: skip
    text = kind(mask_urls).format(record)
    assert "SENTINEL" not in text
    assert "http://***@h:1/" in text


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return tqdm's class, whose bars are logged at every step; restored afterwards."""
    std = pytest.importorskip("tqdm.std")
    monkeypatch.setattr(std.tqdm, "__init__", std.tqdm.__init__)
    log_progress_bars.__wrapped__(0)
    return std.tqdm


def test_a_progress_bar_is_lines_of_the_log(
    bars: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own line would have no end, and the next record would follow on it. Bars in bars, too."""
    with caplog.at_level(logging.INFO):
        for _ in bars(range(2), desc="outer"):
            list(bars(range(2), desc="shards", bar_format="{desc} {bar}\n"))
    assert capfd.readouterr() == ("", "")
    lines = [record.getMessage() for record in caplog.records]
    assert {record.name for record in caplog.records} == {"tqdm"}
    assert {line.partition(" [")[0] for line in lines} == {
        f"{name}:{share} {step}/2"
        for name in ("outer", "shards")
        for share, step in (("   0%", 0), ("  50%", 1), (" 100%", 2))
    }


def test_a_short_progress_bar_has_no_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Many take a second or two. One that a caller sends elsewhere is left to it."""
    std = pytest.importorskip("tqdm.std")
    monkeypatch.setattr(std.tqdm, "__init__", std.tqdm.__init__)
    log_progress_bars.__wrapped__()
    elsewhere = io.StringIO()
    with caplog.at_level(logging.INFO):
        list(std.tqdm(range(3), desc="short"))
        list(std.tqdm(range(3), desc="own", file=elsewhere, delay=0, mininterval=0))
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    assert "own" in elsewhere.getvalue()
