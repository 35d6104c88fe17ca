"""`endpoint-load-metrics` on whole answers of inference, as vLLM writes it on its own.

A stream has none, as on vLLM's server: its headers leave before there is anything to report. The
series are read only for requests that ask.
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

from aiohttp import web

from lmi_vllm.telemetry.metrics import Collectable
from lmi_vllm.web.request import RECORD, SERVICE, RouteGroup

REQUEST_HEADER: Final = "endpoint-load-metrics-format"
RESPONSE_HEADER: Final = "endpoint-load-metrics"
# vLLM's series and their names in a report, in the order of vLLM's: that of their registration.
NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "vllm:num_requests_waiting": "num_requests_waiting",
        "vllm:kv_cache_usage_perc": "kv_cache_usage_perc",
    }
)


def report(style: str, series: Collectable) -> str | None:
    """Return the header's value in that style, `text` or `json`; None for any other.

    With several engines a text names each of them, an object the last one, as vLLM's do.
    """
    order = list(NAMES)  # a restricted registry has no defined order
    samples = [one for metric in series.collect() for one in metric.samples if one.name in NAMES]
    samples.sort(key=lambda one: order.index(one.name))
    load = [(NAMES[one.name], one.value) for one in samples]
    if style.lower() == "text":
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load)
    if style.lower() == "json":
        return f"JSON {json.dumps({'named_metrics': dict(load)})}"
    return None


async def _add_report(request: web.Request, response: web.StreamResponse) -> None:
    """Add the header to an answer of inference that asked for it; an error has none."""
    style = request.headers.get(REQUEST_HEADER)
    if not style or response.status != HTTPStatus.OK or not isinstance(response, web.Response):
        return
    if RECORD in request and request[RECORD].is_inference:
        value = report(style, request.app[SERVICE].telemetry.series(tuple(NAMES)))
        if value is not None:
            response.headers[RESPONSE_HEADER] = value


def _add(app: web.Application) -> None:
    app.on_response_prepare.append(_add_report)


GROUP: Final = RouteGroup(_add)
