"""Errors of ours -> HTTP: one body per route family (http-api.md 6.5 and 12)."""

import json
from collections.abc import Mapping
from typing import Final

import orjson
from aiohttp import web

from lmi_vllm.errors import (
    BadParameterError,
    Fault,
    LmiError,
    MethodNotAllowedError,
    PayloadTooLargeError,
    ResourceNotFoundError,
    RouteFamily,
    openai_error,
    status_of,
    tgi_error,
)

# Faults that inference routes answer in the handler-level shape; all others are the server's.
_HANDLER_LEVEL: Final = frozenset({Fault.CLIENT, Fault.CUSTOM_CODE, Fault.ENGINE})


def error_response(
    error: LmiError, family: RouteFamily, statuses: Mapping[Fault, int] | None = None
) -> web.Response:
    """Return the answer for an error that happened before the first byte.

    `statuses` are the configured codes; the foreign dialects keep their own.
    """
    status = status_of(error, family)
    if statuses and family in (RouteFamily.SERVER, RouteFamily.LMI):
        status = statuses.get(error.fault, status)
    # A client's header may hold bytes that are no text; they must not spoil the answer.
    text = error.text.encode("utf-8", "replace").decode()
    response = web.Response(
        status=status,
        body=_body(error, text, status, family),
        content_type="application/json",
    )
    retry_after = getattr(error, "retry_after_seconds", None)
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    if error.fault is Fault.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _body(error: LmiError, text: str, status: int, family: RouteFamily) -> bytes:
    if family is RouteFamily.OPENAI:
        return orjson.dumps(openai_error(error, text, status))
    if family is RouteFamily.TGI and error.fault is not Fault.UNAUTHORIZED:
        return orjson.dumps(tgi_error(text, status))
    if family is RouteFamily.LMI and error.fault in _HANDLER_LEVEL:
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
