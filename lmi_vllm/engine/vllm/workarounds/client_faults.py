"""Faults of clients in the log of vLLM's handlers, which call them errors, with tracebacks.

Most of vLLM's routes raise an error of the client's, and a handler of the application answers it
without a line. Some catch it first, and log it (messages, Cohere's chat, streams of chats and
completions, transcriptions). A client that sends nonsense could fill the log, and wake an operator.
This server's own line of the request says the status. Failures of the server stay.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: a negative temperature on `/v1/messages` is a line of level ERROR with 40 lines of traceback.
May go: when test_plain_vllm_logs_the_fault_of_a_client_with_its_traceback fails.
"""

import logging
from http import HTTPStatus
from typing import Any, Final

from lmi_vllm.engine.vllm.names import create_error_response

_HANDLERS: Final = "vllm.entrypoints."


def leave_out_faults_of_clients() -> None:
    """Keep them out of the log of all handlers of vLLM's that have been imported."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(_HANDLERS):
            logging.getLogger(name).addFilter(is_no_fault_of_a_client)


def is_no_fault_of_a_client(record: logging.LogRecord) -> bool:
    """Whether to keep a line: the error that it is about is none, or 500 and above."""
    error = record.exc_info[1] if record.exc_info else None
    answers: list[Any] = list(record.args) if isinstance(record.args, tuple) else []
    if isinstance(error, Exception):
        answers.append(create_error_response(error))
    codes = (getattr(getattr(answer, "error", None), "code", None) for answer in answers)
    return all(
        not isinstance(code, int) or code >= HTTPStatus.INTERNAL_SERVER_ERROR for code in codes
    )
