"""Lines of vLLM's log that no user can do anything about."""

import logging
import sys
from collections.abc import Iterator

import pytest

from lmi_vllm.telemetry.expected_lines import is_news, leave_out_expected

EXPECTED = (
    ("vllm.platforms.cpu", "Triton is not installed. triton-cpu is expected on x86 CPUs."),
    ("vllm.config.vllm", "Enforce eager set, disabling torch.compile"),
    ("vllm.model_executor.models.utils", "Attempted to load weight a with dtype b into"),
    ("py.warnings", "/x/site-packages/vllm/triton_utils/a.py:138: FutureWarning: `b` is old"),
)
NEWS = (
    ("vllm.config.vllm", "Something else that is wrong"),
    ("lmi_vllm.server", "Enforce eager set, disabling torch.compile"),
    ("py.warnings", "/opt/lmi_vllm/model.py:3: UserWarning: of a user's code"),
    ("py.warnings", "/home/me/model.py:3: UserWarning: vllm/ is in the text"),
)


def record(name: str, text: str, level: int = logging.WARNING) -> logging.LogRecord:
    """Return a record of the log."""
    return logging.LogRecord(name, level, __file__, 1, text, (), None)


@pytest.fixture
def root_level() -> Iterator[None]:
    """Give the root its level back."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    yield
    root.setLevel(level)


@pytest.mark.parametrize(("name", "text"), EXPECTED)
def test_expected_warning_is_left_out(name: str, text: str) -> None:
    """As a warning; an error with the same words is kept."""
    assert not is_news(record(name, text))
    assert is_news(record(name, text, logging.ERROR))


@pytest.mark.parametrize(("name", "text"), NEWS)
def test_others_are_kept(name: str, text: str) -> None:
    """Other texts, and other loggers."""
    assert is_news(record(name, text))


def test_message_need_not_be_text() -> None:
    """An example connector of vLLM's logs an object; an error would end the engine."""
    assert is_news(record("vllm.distributed", {"kv": 1}))  # type: ignore[arg-type]


@pytest.mark.usefixtures("root_level")
@pytest.mark.parametrize(
    ("environ", "is_terminal", "is_kept"),
    [({}, True, False), ({}, False, True), ({"VLLM_LOGGING_LEVEL": "INFO"}, True, True)],
)
def test_a_terminal_has_vllm_s_warnings_alone(
    environ: dict[str, str], is_terminal: bool, is_kept: bool
) -> None:
    """Unless the operator says what vLLM logs."""
    handler = logging.StreamHandler()
    leave_out_expected(handler, environ, is_terminal=is_terminal)
    assert bool(handler.filter(record("vllm.config", "said", logging.INFO))) is is_kept
    assert bool(handler.filter(record(*EXPECTED[0]))) is bool(environ)
    assert handler.filter(record("lmi_vllm.server", "said", logging.INFO))
    advice = record("vllm.v1.worker.cpu_worker", "%s is not found in LD_PRELOAD. For best")
    assert bool(handler.filter(advice)) is is_kept


@pytest.mark.usefixtures("root_level")
@pytest.mark.parametrize(("term", "is_kept"), [("xterm", False), ("dumb", True)])
def test_what_is_drawn_has_no_line_of_its_own(
    term: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is drawn the lines say what a start does."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    handler = logging.StreamHandler()
    leave_out_expected(handler, {"TERM": term}, is_terminal=True)
    step = record("lmi_vllm.features.start_steps", "starting the engine: %s", logging.INFO)
    assert bool(handler.filter(step)) is is_kept
