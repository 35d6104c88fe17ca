"""Faults of clients in the log of vLLM's handlers, which call them errors, with tracebacks.

Most of vLLM's routes raise an error of the client's, and a handler of the application answers it
without a line. Some catch it first, and log it (messages, Cohere's chat, streams of chats and
completions, transcriptions). With `log_error_stack`, which VLLM_SERVER_DEV_MODE sets, the
application's handlers log all of them, too. A client that sends nonsense could fill the log, and
wake an operator. This server's own line of the request says the status. Failures of the server
stay, but for the engine's end: it is logged once, and not for each of its streams. That a client
cancels a response in the background is no error either.

Parsers of tool calls log with a traceback what they cannot read. It is the model's text, which a
client can make it write, and it stays content of the answer.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: a negative temperature on `/v1/messages` is a line of level ERROR with 40 lines of traceback.
    With hermes so is a call whose JSON is cut or wrong.
May go: when test_plain_vllm_logs_the_fault_of_a_client_with_its_traceback and
    test_plain_vllm_logs_a_call_that_is_no_json_with_its_traceback fail.
"""

import asyncio
import logging
import sys
from http import HTTPStatus
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from lmi_vllm.engine.vllm.names import VllmEngineDeadError, create_error_response
from lmi_vllm.engine.vllm.workarounds.tool_calls import UNREAD

_HANDLERS: Final = "vllm.entrypoints."
_PARSERS: Final = "vllm.tool_parsers."


def leave_out_faults_of_clients() -> None:
    """Keep them out of the log of all handlers and parsers of vLLM's that have been imported."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(_HANDLERS):
            logging.getLogger(name).addFilter(is_fault_of_the_server)
        if name.startswith(_PARSERS):
            logging.getLogger(name).addFilter(is_no_unread_text)


def is_no_unread_text(record: logging.LogRecord) -> bool:
    """Whether to keep a line of a parser: it is about no text that the parser could not read."""
    return not (record.exc_info and isinstance(record.exc_info[1], UNREAD))


def is_fault_of_the_server(record: logging.LogRecord) -> bool:
    """Whether to keep a line: the error that it is about is none, or 500 and above."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None and record.levelno >= logging.ERROR:
        error = sys.exception()  # what is being handled, where only a request's id is logged
    if isinstance(error, VllmEngineDeadError | asyncio.CancelledError):
        return False
    answers: list[Any] = list(record.args) if isinstance(record.args, tuple) else []
    codes = [getattr(getattr(answer, "error", None), "code", None) for answer in answers]
    if isinstance(error, Exception):
        codes.append(_code(error))
    return all(
        not isinstance(code, int) or code >= HTTPStatus.INTERNAL_SERVER_ERROR for code in codes
    )


def _code(error: Exception) -> int:
    if isinstance(error, RequestValidationError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, HTTPException):
        return error.status_code
    return int(create_error_response(error).error.code)
