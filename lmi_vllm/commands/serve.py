"""`serve`: listen at once, load the model behind the open port, run, drain."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Final, NoReturn

import uvloop
from aiohttp.http_exceptions import HttpProcessingError

from lmi_vllm.checks.platform import raise_open_files
from lmi_vllm.clock import LOG_FLUSH_SECONDS
from lmi_vllm.commands.explain import add_settings_arguments, command_line_of, valid_settings
from lmi_vllm.config.secrets import mask_text, mask_urls
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.config.value_rules import log_level
from lmi_vllm.engine.vllm.processes import DROPPED_LINES_VARIABLE
from lmi_vllm.messages import LOG_LEVELS
from lmi_vllm.private_folders import remove_held
from lmi_vllm.server.end_budget import end_seconds
from lmi_vllm.server.engines import check_engine_kind, engine_factory
from lmi_vllm.server.parts import Assembled
from lmi_vllm.server.server import Server
from lmi_vllm.signals import end_children
from lmi_vllm.telemetry.expected_lines import leave_out_expected
from lmi_vllm.telemetry.log_format import Format, chosen_format, configure_logging
from lmi_vllm.telemetry.log_handler import can_draw, telling, told_lines, write_within
from lmi_vllm.telemetry.metrics import DROPPED_LINES

logger = logging.getLogger(__name__)

LATE_SECONDS: Final = 0.5  # after the end should have been over


def add_arguments(parser: argparse.ArgumentParser, assembled: Assembled) -> None:
    """Declare the flags of `serve`."""
    add_settings_arguments(parser)
    parser.add_argument(
        "--engine",
        choices=assembled.parts.engines.names,
        default="vllm",
        help="scripted repeats the prompt: for trying the server without vLLM",
    )


def run(
    arguments: argparse.Namespace, environ: Mapping[str, str], assembled: Assembled
) -> NoReturn:
    """Serve until stopped; never returns: see `end_process`."""
    typed = command_line_of(arguments, assembled.configuration.options)
    # Else the process ends before the port opens.
    settings = valid_settings(typed, environ, assembled.configuration)
    configure_server_logging(settings, environ)
    for warning in raise_open_files(settings.server.job_queue_size):
        logger.warning("%s", warning)
    check_engine_kind(settings, arguments.engine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code, reason = runner.run(
            _serve_until_stopped(settings, typed, environ, arguments.engine, assembled)
        )
        end_process(
            code, f"lmi-vllm: error: {mask_text('', ' '.join(reason.split()))}" * bool(reason)
        )


async def _serve_until_stopped(
    settings: Settings,
    typed: CommandLine,
    environ: Mapping[str, str],
    engine_kind: str,
    assembled: Assembled,
) -> tuple[int, str]:
    """Serve until a signal, or run a feature's replacement; return exit code and reason."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    at_last = threading.Timer(end_seconds(settings) + LATE_SECONDS, end_unfinished)
    at_last.daemon = True

    def begin_end() -> None:
        stop.set()
        if at_last.ident is None:
            at_last.start()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Not below nohup. A script that starts it with `&` ignores SIGINT, too: see signals.py.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, begin_end)
    own, choices = assembled.configuration.translator.engines, assembled.parts.engines
    factory = engine_factory(engine_kind, environ, os.environ, _log_format(settings), own, choices)
    for select in assembled.parts.run_modes:
        if (run_mode := select(settings)) is not None:
            return await run_mode(assembled, settings, typed, environ, factory, os.environ, stop)
    server = Server(assembled, settings, typed, environ, factory, os.environ)
    return await server.run(stop)


def configure_server_logging(settings: Settings, environ: Mapping[str, str]) -> None:
    """Send our lines to stderr; stdout is for the lines that scripts read.

    SERVING_OPTS may set the level as in LMI: -Dai.djl.logging.level=debug.
    """
    level = LOG_LEVELS[log_level(settings.server.opts or "")]
    told = told_lines(DROPPED_LINES.inc)
    os.environ[DROPPED_LINES_VARIABLE] = f"/proc/{os.getpid()}/fd/{told}"
    is_terminal = sys.stderr.isatty()
    handler = configure_logging(
        _log_format(settings), level, mask_urls, telling(told), is_drawn_on=can_draw(environ)
    )
    leave_out_expected(handler, environ, is_terminal=is_terminal)
    if (name := environ.get("VLLM_LOGGING_LEVEL", "").upper()) in logging.getLevelNamesMapping():
        logging.getLogger("vllm").setLevel(name)
    logging.getLogger("aiohttp.server").addFilter(_without_trace)


def _log_format(settings: Settings) -> Format:
    return chosen_format(settings.server.lmi_log_format, sys.stderr)


def _without_trace(record: logging.LogRecord) -> bool:
    """Reduce a report of malformed HTTP to one line, so that clients cannot fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.exc_info = None
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "%s: %s", (record.getMessage(), " ".join(error.message.split()))
    return True


def end_unfinished() -> NoReturn:
    """End the process although something of it hangs, before SageMaker or Kubernetes kill it."""
    text = "lmi-vllm: warning: the end took too long: the process ends without the rest of it"
    write_within(LATE_SECONDS, print, text, file=sys.stderr)
    end_children()
    remove_held()
    os._exit(0)


def end_process(code: int, last_line: str = "") -> NoReturn:
    """End the process now, without waiting for a thread that is still importing vLLM.

    Neither stdout nor the last line of stderr is waited for longer than the log, because their
    reader may have stopped.
    """
    write_within(LOG_FLUSH_SECONDS, sys.stdout.flush)
    logging.shutdown()
    if last_line:
        write_within(LOG_FLUSH_SECONDS, print, last_line, file=sys.stderr)
    end_children()  # an engine that is being forked may not yet end with its parent
    remove_held()  # of an engine that was not waited for, and of one that was being started
    os._exit(code)
