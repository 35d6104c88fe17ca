"""From an HTTP request to its record: bounded labels, and nothing secret of its address."""

from typing import Final
from urllib.parse import quote

from aiohttp import web

from lmi_vllm.telemetry.hub import Telemetry
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from lmi_vllm.web.route_families import OPEN_PATHS, dialect_of

UNKNOWN_ROUTE: Final = "other"
MASK: Final = "***"
PEER: Final = "x-lmi-vllm-peer"
LONGEST_PATH: Final = 256  # characters of what somebody typed
# Values that cannot be secrets; `src` and `url` may hold a login or a signature.
SHOWN_QUERY: Final = frozenset(
    {
        "limit", "next_page_token", "name", "preload", "pin", "starting_after", "stream",
        "model_name", "synchronous", "min_worker", "max_worker", "level", "name[]",
    }
)  # fmt: skip
# Asked every few seconds.
UNTRACED: Final = OPEN_PATHS | {
    "/metrics", "/server/metrics", "/v2/health/live", "/v2/health/ready"
}  # fmt: skip
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def begin_record(
    request: web.Request, request_id: str, telemetry: Telemetry, *, is_tgi: bool
) -> RequestRecord:
    """Return the record of a request that has just come; it is the current one from here on."""
    resource = request.match_info.route.resource
    record = RequestRecord(
        request_id,
        request.method if request.method in _METHODS else UNKNOWN_ROUTE,
        UNKNOWN_ROUTE if resource is None else resource.canonical,
        shown_path(request),
        peer_of(request),
        str(dialect_of(request.path, is_tgi=is_tgi)),
        telemetry.observers,
    )
    if telemetry.start_span is not None and record.route not in UNTRACED:
        record.span = telemetry.start_span(record, request.headers)
        record.trace_headers = record.span.headers
    enter_record(record)
    return record


def peer_of(request: web.Request) -> str:
    """Return the client's address; another front-end process says whose request it hands on.

    Only processes of this server, and whoever may open its Unix socket, are believed.
    """
    return request.remote or request.headers.get(PEER) or "-"


def shown_path(request: web.Request) -> str:
    """Return path and query as they may be logged: of unknown parameters only the name."""
    path = request.rel_url.raw_path[:LONGEST_PATH]
    if not request.rel_url.raw_query_string:
        return path
    pairs = (
        f"{quote(name, safe='[]')}={quote(value) if name in SHOWN_QUERY else MASK}"
        for name, value in request.query.items()
    )
    return f"{path}?{'&'.join(pairs)}"[:LONGEST_PATH]
