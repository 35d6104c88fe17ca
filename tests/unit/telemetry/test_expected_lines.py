"""Lines of vLLM's log that no user can do anything about."""

import logging
from collections.abc import Iterator

import pytest

from lmi_vllm.telemetry.expected_lines import is_news, leave_out_expected

EXPECTED = (
    ("vllm.platforms.cpu", "Triton is not installed. triton-cpu is expected on x86 CPUs."),
    ("vllm.config.vllm", "Enforce eager set, disabling torch.compile"),
    ("py.warnings", "/x/site-packages/vllm/triton_utils/a.py:138: FutureWarning: `b` is old"),
)
NEWS = (
    ("vllm.config.vllm", "Something else that is wrong"),
    ("lmi_vllm.server", "Enforce eager set, disabling torch.compile"),
    ("py.warnings", "/home/me/model.py:3: UserWarning: vllm/ is in the text"),
)


def record(name: str, text: str, level: int = logging.WARNING) -> logging.LogRecord:
    """Return a record of the log."""
    return logging.LogRecord(name, level, __file__, 1, text, (), None)


@pytest.fixture
def vllm_level() -> Iterator[None]:
    """Give vLLM's logger back its level."""
    loggers = (logging.getLogger("vllm"), logging.getLogger())
    levels = [logger.level for logger in loggers]
    loggers[1].setLevel(logging.INFO)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(("name", "text"), EXPECTED)
def test_expected_warning_is_left_out(name: str, text: str) -> None:
    """As a warning; an error with the same words is kept."""
    assert not is_news(record(name, text))
    assert is_news(record(name, text, logging.ERROR))


@pytest.mark.parametrize(("name", "text"), NEWS)
def test_others_are_kept(name: str, text: str) -> None:
    """Other texts, and other loggers."""
    assert is_news(record(name, text))


@pytest.mark.usefixtures("vllm_level")
@pytest.mark.parametrize(
    ("environ", "is_terminal", "level"),
    [
        ({}, True, logging.WARNING),
        ({}, False, logging.INFO),
        ({"VLLM_LOGGING_LEVEL": "INFO"}, True, logging.INFO),
    ],
)
def test_a_terminal_has_vllm_s_warnings_alone(
    environ: dict[str, str], is_terminal: bool, level: int
) -> None:
    """Unless the operator says what vLLM logs."""
    handler = logging.StreamHandler()
    leave_out_expected(handler, environ, is_terminal=is_terminal)
    assert logging.getLogger("vllm").getEffectiveLevel() == level
    warning = record(*EXPECTED[0])
    assert bool(handler.filter(warning)) is bool(environ)
