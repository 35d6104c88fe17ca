"""Set-up of vLLM's engine processes: they end with the server, log as it does, report errors.

The engine is forked where that is safe, else spawned (`start_method`), so there are two ways: a
fork hook (`forks`), and vLLM's general plugin. vLLM calls the plugin (`register_plugin`, an entry
point in pyproject.toml) in every process that it spawns, or that the fork server forks. This module
imports no vLLM: it runs before or without it.
"""

import contextlib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lmi_vllm.engine.vllm.forks import START_METHOD, end_with_parent
from lmi_vllm.engine.vllm.parts import ProcessParts
from lmi_vllm.engine.vllm.signals import heed_only_the_parent
from lmi_vllm.engine.vllm.start_steps import watch_as_the_server
from lmi_vllm.engine.vllm.workarounds import Scope, apply_to_the_end
from lmi_vllm.engine.vllm.workarounds.not_finite import is_expected
from lmi_vllm.telemetry.expected_lines import leave_out_expected
from lmi_vllm.telemetry.log_format import configure_logging, log_progress_bars
from lmi_vllm.telemetry.log_handler import can_draw, ignore_dropped, telling

# The user's value: vLLM overwrites it at each start, also at one that fails.
CONFIGURED_METHOD: Final = os.environ.get(START_METHOD, "").strip().lower() or None
# The server sets it for the processes that it starts; without it another program uses vLLM.
SERVER_PID_VARIABLE: Final = "LMI_VLLM_SERVER_PID"
ERROR_FILE_VARIABLE: Final = "LMI_VLLM_ENGINE_ERROR_FILE"
# Set where the size of the KV cache is the server's choice and not the operator's: to the number of
# workers that share this memory, which a data parallel engine of several does not know.
CHOSEN_VARIABLE: Final = "LMI_VLLM_CACHE_IS_CHOSEN"
# The format of log lines; set if vLLM's lines have our format, too.
LOG_FORMAT_VARIABLE: Final = "LMI_VLLM_LOG_FORMAT"
# Where a process that was not forked tells how many lines of its log it dropped.
DROPPED_LINES_VARIABLE: Final = "LMI_VLLM_DROPPED_LINES"
# Loggers of vLLM 0.32 with the reason why an engine core or a worker did not start, or why a
# model's class could not be inspected (a package for pictures is missing, for example).
ENGINE_LOGGERS: Final = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.registry",
)
# The logger that warns of a scheduler other than vLLM's, such as ours.
SCHEDULER_LOGGER: Final = "vllm.config.scheduler"

# The function of vLLM's executor that logs a worker's name and exit code, and nothing else.
_WORKER_MONITOR: Final = "monitor_workers"
_STDERR: Final = 2


def claim_children() -> None:
    """Mark the processes that are started from here on as this server's, in the environment."""
    os.environ[SERVER_PID_VARIABLE] = str(os.getpid())


def described(error: BaseException) -> str:
    """Return an error in one line: its class and text, or without a text the line that raised it.

    vLLM asserts the sizes of weights without a text, and the line names what they must be.
    """
    text, frames = str(error).strip(), traceback.extract_tb(error.__traceback__)
    if not text and frames:
        text = f"{frames[-1].line} (in {frames[-1].name}, {Path(frames[-1].filename).name})"
    return " ".join(f"{type(error).__name__}: {text}".split())


class RootCauseFilter(logging.Filter):
    """A log filter that writes every exception of the engine to a file for the server.

    vLLM reports a failed start as "See root cause above", and only a child's log has the cause. It
    is a filter, because vLLM's logging set-up removes handlers. It drops no record. The exit code
    of a worker that ends later is written to a file beside.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)

    def filter(self, record: logging.LogRecord) -> bool:
        """Write an exception in one line; a failure to write must not hide the engine's own."""
        cause = record.exc_info[1] if record.exc_info else None
        if cause is not None:
            text = described(cause)
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        if record.funcName == _WORKER_MONITOR and isinstance(record.args, tuple):
            codes = [code for code in record.args if isinstance(code, int)]
            with contextlib.suppress(OSError):
                worker_ends(self._path).write_text(f"{codes[0]}\n" if codes else "")
        return True


def watch_root_causes(path: str) -> Callable[[], None]:
    """Note what engine and worker processes log as exceptions; returns what ends the watch."""
    watcher = RootCauseFilter(path)
    loggers = [logging.getLogger(name) for name in ENGINE_LOGGERS]
    for engine_logger in loggers:
        engine_logger.addFilter(watcher)
    logging.getLogger(SCHEDULER_LOGGER).addFilter(is_expected)

    def stop() -> None:
        for engine_logger in loggers:
            engine_logger.removeFilter(watcher)

    return stop


def worker_ends(error_file: Path) -> Path:
    """Return the file with the exit code of an engine's worker."""
    return error_file.with_name("worker-ends")


def read_worker_end(path: Path) -> int | None:
    """Return the exit code of the engine's worker that has ended; None if it is not known (yet)."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def read_root_cause(path: Path) -> str | None:
    """Return the first recorded cause that is more than "see above"; None without one."""
    return next(iter(_causes(path)), None)


def read_last_cause(path: Path) -> str:
    """Return what a process of the engine has logged last, of such causes; empty without one."""
    return next(reversed(_causes(path)), "")


def _causes(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if "See root cause above" not in line and line]


def log_as_the_server() -> None:
    """Give a process that was not forked the server's log format; a forked one inherits it."""
    kind = os.environ.get(LOG_FORMAT_VARIABLE)
    if kind in ("text", "json") and not logging.getLogger().handlers:
        level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
        count: Callable[[int], None] = ignore_dropped
        with contextlib.suppress(KeyError, OSError):  # on another machine, without /proc
            told = os.open(os.environ[DROPPED_LINES_VARIABLE], os.O_WRONLY | os.O_NONBLOCK)
            count = telling(told)
        is_terminal = os.isatty(_STDERR)
        handler = configure_logging(
            "json" if kind == "json" else "text",
            level,
            count_dropped=count,
            is_drawn_on=can_draw(os.environ),
        )
        leave_out_expected(handler, os.environ, is_terminal=is_terminal)
        watch_as_the_server(handler, os.environ)


def keep_bars_out_of_the_log() -> None:
    """Log progress bars as lines, but on a terminal that the line of a start does not draw on."""
    kind = os.environ.get(LOG_FORMAT_VARIABLE)
    is_file = kind == "text" and not os.isatty(_STDERR)
    if kind == "json" or is_file or (kind == "text" and can_draw(os.environ)):
        log_progress_bars()


def register_models() -> None:
    """Register the model classes of features by name; each is imported when a model needs it."""
    if "vllm" not in sys.modules:  # vLLM itself has been imported when it calls its plugins
        return
    models = importlib.import_module("vllm.model_executor.models")
    for name, place in process_parts().model_classes.items():
        models.ModelRegistry.register_model(name, place)


def process_parts() -> ProcessParts:
    """Return what features do in this process, which vLLM started.

    This is the one look-up of the composition root by its name. vLLM calls plug-ins before it has
    read a configuration that could carry names, and a key of the compile cache is made of it.
    """
    parts: ProcessParts = importlib.import_module("lmi_vllm.assembly").process_parts()
    return parts


def register_plugin() -> None:
    """Entry point for vLLM: runs in the server and in each process that vLLM starts."""
    server_pid = os.environ.get(SERVER_PID_VARIABLE)
    if server_pid is None or int(server_pid) == os.getpid():
        return
    register_models()
    apply_to_the_end(Scope.TOKENIZERS)
    if "vllm.v1.executor.multiproc_executor" in sys.modules:  # in an engine core, as a rule
        apply_to_the_end(Scope.ENGINE)
    end_with_parent(os.getppid())
    log_as_the_server()
    keep_bars_out_of_the_log()
    with contextlib.suppress(PermissionError):  # already a group or session leader
        os.setpgrp()
    with contextlib.suppress(ValueError):  # not in the main thread
        heed_only_the_parent(int(server_pid))  # the fork server is the parent of its processes
    if error_file := os.environ.get(ERROR_FILE_VARIABLE):
        watch_root_causes(error_file)


def is_cache_chosen() -> bool:
    """Whether the server has chosen the size of this engine's KV cache."""
    return CHOSEN_VARIABLE in os.environ


def workers_here() -> int:
    """Return the number of workers with a cache in this memory; 1 unless its size is chosen."""
    return int(os.environ.get(CHOSEN_VARIABLE) or 1)


def own_error_file() -> Path | None:
    """Return the file for errors of the engine that this process is of; None without a server."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    return Path(path) if path else None
