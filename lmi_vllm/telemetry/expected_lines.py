"""Lines of vLLM's log that a user can do nothing about, or that a terminal has no room for."""

import logging
from collections.abc import Mapping
from typing import Final

from lmi_vllm.telemetry.log_handler import can_draw

_LEVEL: Final = "VLLM_LOGGING_LEVEL"
# How warnings of vLLM 0.31 to 0.33 begin that say what this server or the platform has chosen.
_EXPECTED: Final = (
    "Triton is installed, but doesn't include CPU backend",
    "Triton is not installed. triton-cpu is expected",
    "Model Runner V2 requires Triton",
    "The global random seed is set to",  # the engine is a process of its own
    "Reset SSM cache type",
    "Enforce eager set, disabling",
    "Inductor compilation was disabled by user settings",
    "Attempted to load weight",  # whose dtype is another: one line for each of the model's
    "Failed to create oneDNN linear, fallback",
    "CPU backend doesn't allow to use `torch.set_num_threads`",
    "The chat template requires system-first ordering",
    "torchcodec unavailable",  # one line for each sound; the next library decodes it
)
# Advice for CPUs in production, and a fact of adapters.
_NOT_ON_A_TERMINAL: Final = ("%s is not found in LD_PRELOAD", "%s was trained on ")
# What the moving line and the summary of a start show.
_DRAWN: Final = (
    "starting the engine: ", "starting: ", "engine argument ", "importing vLLM", "model %s from %s",
)  # fmt: skip
_DEPRECATED: Final = "/site-packages/vllm/"  # a warning of Python's about a line of vLLM's code
_WARNINGS: Final = "py.warnings"


def is_news(record: logging.LogRecord) -> bool:
    """Whether to keep a line: not those that every start on such a machine has."""
    if record.levelno > logging.WARNING:
        return True
    if record.name == _WARNINGS:
        return _DEPRECATED not in record.getMessage().partition(":")[0]
    return not record.name.startswith("vllm") or not str(record.msg).startswith(_EXPECTED)


def is_news_on_a_terminal(record: logging.LogRecord) -> bool:
    """Whether to keep a line where there is room for little."""
    is_chatter = record.levelno < logging.WARNING and record.name.startswith("vllm")
    is_shown = record.levelno > logging.WARNING or not str(record.msg).startswith(
        _NOT_ON_A_TERMINAL
    )
    return not is_chatter and is_shown and is_news(record)


def is_not_drawn(record: logging.LogRecord) -> bool:
    """Whether a line says more than the moving line of a start and its summary."""
    return record.levelno > logging.WARNING or not str(record.msg).startswith(_DRAWN)


def leave_out_expected(
    handler: logging.Handler, environ: Mapping[str, str], *, is_terminal: bool
) -> None:
    """Keep such lines out of the log, and what vLLM says below a warning off a terminal.

    Both are there with the level debug, or where VLLM_LOGGING_LEVEL says what vLLM logs.
    """
    if _LEVEL not in environ and logging.getLogger().level >= logging.INFO:
        handler.addFilter(is_news_on_a_terminal if is_terminal else is_news)
        if can_draw(environ):
            handler.addFilter(is_not_drawn)
