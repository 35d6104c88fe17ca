"""One line for each request (startup.md 10), with what scripts want of it as fields."""

import logging
from typing import Final

from lmi_vllm.telemetry.records import RequestSummary

logger = logging.getLogger("lmi_vllm.requests")

_MILLISECONDS: Final = 1000
_POLLED: Final = "/console/state"  # by an open page, every other second: below info
_FIRST_ERROR: Final = 400


def log_request(summary: RequestSummary) -> None:
    """Write the line: upstream's access line, then the request's id and figures."""
    is_poll = summary.route == _POLLED and summary.status < _FIRST_ERROR
    level = logging.DEBUG if is_poll else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = _fields(summary)
    figures = "".join(f" {name}={value}" for name, value in _figures(summary).items())
    logger.log(
        level,
        '%s "%s %s HTTP/1.1" %d %d RequestId=[%s]%s',
        summary.remote,
        summary.method,
        summary.shown_path,
        summary.status,
        fields["milliseconds"],
        summary.request_id,
        figures,
        extra={"fields": fields},
    )


def _fields(summary: RequestSummary) -> dict[str, object]:
    return {
        "request_id": summary.request_id,
        "remote": summary.remote,
        "method": summary.method,
        "path": summary.shown_path,
        "route": summary.route,
        "dialect": summary.dialect,
        "status": summary.status,
        "milliseconds": round(summary.seconds * _MILLISECONDS),
        **_figures(summary),
    }


def _figures(summary: RequestSummary) -> dict[str, object]:
    """Return what only some requests have."""
    found: dict[str, object] = {}
    if summary.adapter:
        found["adapter"] = summary.adapter
    if summary.prompt_tokens or summary.generated_tokens:
        found["prompt_tokens"] = summary.prompt_tokens
        found["generated_tokens"] = summary.generated_tokens
    for name, seconds in (
        ("first_token_milliseconds", summary.first_token_seconds),
        ("token_milliseconds", summary.token_seconds),
        ("queue_milliseconds", summary.queue_seconds),
    ):
        if seconds is not None:
            found[name] = round(seconds * _MILLISECONDS, 1)
    if summary.fault is not None:
        found["fault"] = str(summary.fault)
    if summary.is_background:
        found["deferred"] = True
    if summary.is_disconnected:
        found["disconnected"] = True
    return found
