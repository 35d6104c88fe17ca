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
    status_of,
)

# TGI's error kinds (its router's `error_type`) by fault; the rest is an incomplete generation.
_TGI_KINDS: Final[Mapping[Fault, str]] = {
    Fault.CLIENT: "validation",
    Fault.TOO_LARGE: "validation",
    Fault.OVERLOAD: "overloaded",
    Fault.NOT_READY: "unhealthy",
}
# Faults answered in the server-level shape even on inference routes.
_SERVER_LEVEL: Final = frozenset(
    {
        Fault.NOT_FOUND,
        Fault.METHOD,
        Fault.BAD_PARAMETER,
        Fault.CONFLICT,
        Fault.TOO_LARGE,
        Fault.MEMORY,
        Fault.OVERLOAD,
        Fault.NOT_READY,
        Fault.DEADLINE,
    }
)


def error_response(error: LmiError, family: RouteFamily) -> web.Response:
    """Return the answer for an error that happened before the first byte."""
    status = status_of(error, family)
    if family is RouteFamily.OPENAI:
        detail = {"message": error.text, "type": error.kind, "param": None, "code": status}
        body = orjson.dumps({"error": detail})
    elif family is RouteFamily.TGI:
        kind = _TGI_KINDS.get(error.fault, "incomplete_generation")
        body = orjson.dumps({"error": error.text, "error_type": kind})
    elif family is RouteFamily.LMI and error.fault is Fault.ENGINE:
        body = orjson.dumps({"error": error.text, "code": status, "message": error.text}) + b"\n"
    elif family is RouteFamily.LMI and error.fault not in _SERVER_LEVEL:
        body = orjson.dumps({"error": error.text, "code": status}) + b"\n"
    else:
        document = {"code": status, "type": error.kind, "message": error.text}
        body = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    response = web.Response(status=status, body=body, content_type="application/json")
    retry_after = getattr(error, "retry_after_seconds", None)
    if retry_after is not None:
        response.headers["Retry-After"] = str(retry_after)
    return response


def from_http_exception(error: web.HTTPException, limit_bytes: int) -> LmiError:
    """Return our error for one that aiohttp raised while routing or reading."""
    if error.status == web.HTTPNotFound.status_code:
        return ResourceNotFoundError()
    if error.status == web.HTTPMethodNotAllowed.status_code:
        return MethodNotAllowedError()
    if error.status == web.HTTPRequestEntityTooLarge.status_code:
        return PayloadTooLargeError(
            f"The request body is larger than max_request_size ({limit_bytes} bytes)"
        )
    return BadParameterError(error.reason or "The request cannot be read.")
