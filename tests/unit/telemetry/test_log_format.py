"""One format for every line: JSON that parses whatever a record holds, text on a terminal."""

import io
import json
import logging
import sys
from typing import Any

import pytest

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.telemetry.log_format import (
    BarLines,
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


class Seconds:
    """Stands for the module `time`: a clock that is set."""

    now = 100.0

    def monotonic(self) -> float:
        """Return the time that was set."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    """Return the clock of the lines of bars."""
    seconds = Seconds()
    monkeypatch.setattr("lmi_vllm.telemetry.log_format.time", seconds)
    return seconds


@pytest.fixture
def bar(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return tqdm's class with its bars in the log; restored afterwards."""
    std = pytest.importorskip("tqdm.std")
    monkeypatch.setattr(std.tqdm, "__init__", std.tqdm.__init__)
    log_progress_bars.__wrapped__(getattr(request, "param", 10))
    return std.tqdm


def test_a_progress_bar_is_lines_of_the_log(
    clock: Seconds, caplog: pytest.LogCaptureFixture
) -> None:
    """At most one in ten seconds, and the last state; a bar below another one has its own."""
    lines = BarLines(10)
    with caplog.at_level(logging.INFO):
        for second in range(25):
            clock.now = 100.0 + second
            lines.write(f"\r\x1b[Ashards: {second}/25   ")
        lines.write("\n")
        lines.write("\n")
    assert [record.getMessage() for record in caplog.records] == [
        "shards: 10/25", "shards: 20/25", "shards: 24/25",
    ]  # fmt: skip
    assert {record.name for record in caplog.records} == {"tqdm"}


@pytest.mark.parametrize("bar", [0], indirect=True)
def test_a_bar_says_what_it_counts(bar: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without the picture of a bar, whatever form the caller asks for."""
    with caplog.at_level(logging.INFO):
        list(bar(range(2), "shards", bar_format="{desc} {bar}\n"))
    lines = {record.getMessage().partition(" [")[0] for record in caplog.records}
    assert lines == {"shards:   0% 0/2", "shards:  50% 1/2", "shards: 100% 2/2"}


@pytest.mark.parametrize(
    "options", [{}, {"mininterval": 0, "delay": 0}, {"file": sys.stderr}, {"leave": False}]
)
def test_a_short_progress_bar_has_no_line(
    options: dict[str, Any],
    bar: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Many take a second or two, also those whose caller wants them drawn more often."""
    if "file" in options:
        options = {"file": sys.stderr}  # of this test
    with caplog.at_level(logging.INFO):
        one = bar(range(3), "short", **options)
        for step in one:
            one.set_postfix(step=step)  # draws at once
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_a_bar_that_is_sent_elsewhere_stays_there(
    bar: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By name or by place, as tqdm takes it."""
    elsewhere = io.StringIO()
    list(bar(range(3), "own", 3, True, elsewhere))
    assert "own: 100%" in elsewhere.getvalue()
    assert not caplog.records


def test_text_of_a_client_forges_no_line_of_its_own() -> None:
    """A name with a line end and ESC looked like a line of the server, or cleared the terminal."""
    name = "a\n2026-01-01 00:00:00,000 INFO root forged\x1b[2J\u202e\x9b1m\rend\ttab"
    record = logging.LogRecord("x", logging.INFO, "", 0, "adapter %s", (name,), None)
    lines = TextFormatter().format(record).split("\n")
    assert lines[1].startswith("    2026-01-01")
    assert len(lines) == 2
    assert lines[1].endswith("forged\\x1b[2J\\u202e\\x9b1m\\rend\ttab")
