"""HTTP responses of errors: one body for each dialect."""

import json
from typing import Final

import orjson
from aiohttp import web

from lmi_vllm.errors import (
    DEFAULT_STATUSES,
    BadParameterError,
    Dialect,
    Fault,
    LmiError,
    MethodNotAllowedError,
    PayloadTooLargeError,
    ResourceNotFoundError,
    StatusTable,
    anthropic_error,
    openai_error,
    tgi_error,
)

# Faults that inference routes answer in the handler's format; others in the server's.
_HANDLER_LEVEL: Final = frozenset({Fault.CLIENT, Fault.CUSTOM_CODE, Fault.ENGINE, Fault.MEMORY})


def error_response(
    error: LmiError, dialect: Dialect, statuses: StatusTable = DEFAULT_STATUSES
) -> web.Response:
    """Return the answer for an error before the first byte."""
    status = statuses.of(error, dialect)
    # The message may quote a client's header with bytes that are not UTF-8.
    text = error.text.encode("utf-8", "replace").decode()
    response = web.Response(
        status=status,
        body=_body(error, text, status, dialect),
        content_type="application/json",
    )
    retry_after = getattr(error, "retry_after_seconds", None)
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    if error.fault is Fault.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _body(error: LmiError, text: str, status: int, dialect: Dialect) -> bytes:
    if dialect is Dialect.OPENAI:
        return orjson.dumps(openai_error(error, text, status))
    if dialect is Dialect.ANTHROPIC:
        return orjson.dumps(anthropic_error(error, text, status))
    if dialect is Dialect.COHERE:
        return orjson.dumps({"message": text})
    if dialect is Dialect.TGI and error.fault is not Fault.UNAUTHORIZED:
        return orjson.dumps(tgi_error(text, status))
    if dialect is Dialect.LMI and error.fault in _HANDLER_LEVEL:
        row = {"error": text, "code": status}
        if error.fault is Fault.ENGINE:
            row["message"] = text
        return orjson.dumps(row) + b"\n"
    document = {"code": status, "type": error.kind, "message": text}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def from_http_exception(error: web.HTTPException, limit_bytes: int) -> LmiError:
    """Return our error for one that aiohttp raised while routing or reading."""
    if error.status == web.HTTPNotFound.status_code:
        return ResourceNotFoundError()
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowedError(allowed=sorted(error.allowed_methods))
    if error.status == web.HTTPRequestEntityTooLarge.status_code:
        return PayloadTooLargeError(
            f"The request body is larger than max_request_size ({limit_bytes} bytes)"
        )
    return BadParameterError(error.reason or "The request cannot be read.")


def forget_frames(error: BaseException) -> None:
    """Drop the frames that an answered error and what led to it hold: the request's body is there.

    A frame that keeps its own error is a cycle, which the rare collections would free much later.
    """
    pending, seen = [error], set()
    while pending:
        each = pending.pop()
        seen.add(id(each))
        each.__traceback__ = None
        found = [each.__cause__, each.__context__]
        found += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        pending += [one for one in found if one is not None and id(one) not in seen]
