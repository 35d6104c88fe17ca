"""How vLLM's own server and ours are compared: what of an answer counts, and what may differ.

The intended differences are a table here; docs/vllm-differences.md describes the same cases.
"""

import http.client
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

import pytest

from integration.bench.servers import running
from integration.client import connect
from integration.compared_requests import Request

PAGE: Final = Path(__file__).parent.parent / "docs" / "vllm-differences.md"
ATTEMPTS: Final = 20  # at a stream: on a busy machine vLLM joins tokens that were not fetched
# Headers of every answer that are not compared.
EVERYWHERE: Final = frozenset(
    {
        "cache-control", "pragma", "expires", "x-request-id",  # ours
        "server", "vary",  # vLLM's: uvicorn, and its CORS middleware
        "date", "content-length",  # of bodies whose ids have other lengths
    }
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """What differs on purpose: in which parts of the answers to which requests."""

    case: str  # as in the first column of the page's table
    parts: frozenset[str]
    names: str  # of requests, as a regular expression


def difference(case: str, parts: str, names: str) -> Difference:
    """Return a row of the table."""
    return Difference(case, frozenset(parts.split()), names)


DIFFERENCES: Final = (
    difference(
        "a stream of `/v1/responses` that is cut",
        "body",
        r"^(code \d+: POST )?/v1/responses stream( of an adapter|, usage|: yes|, own id)?$",
    ),
    difference(
        "a path that neither server has",
        "body content-type",
        r" (in front|capitals|dots|below|without /v1|no such route)$|(?<=/)nothing$"
        r"|^GET /v\d(/|/no|/models/x)?$|^/api/api/",
    ),
    difference(
        "`/`",
        "status body content-type content-security-policy x-content-type-options",
        r"^GET /api/?$",
    ),
    difference(
        "`Location` of a redirect",
        "location",
        r" (slash|two slashes|slash and query)$|^GET /(v1/models|version|load)/$",
    ),
    difference(
        "a preflight, no origin configured",
        "status body content-type allow access-control-allow-methods access-control-max-age "
        "access-control-allow-headers",
        r"preflight",
    ),
    difference(
        "a preflight, an origin configured",
        "status body content-type access-control-allow-methods access-control-allow-headers "
        "access-control-max-age access-control-expose-headers",
        r"^asked by ",
    ),
    difference(
        "an answer to a page of an allowed site",
        "access-control-allow-methods access-control-allow-headers access-control-expose-headers",
        r" from .*invited",
    ),
    difference(
        "`/health`, `/ping`",
        "body content-type",
        r"^GET (/api)?/health( no key)?$|^own route \w+ /ping$",
    ),
    difference("`/metrics`", "body content-type", r"^own route GET /metrics$"),
    difference("`/docs`, `/openapi.json`", "body", r"^own route GET /(docs|openapi.json)$"),
    difference(
        "`/redoc`, `/docs/oauth2-redirect`",
        "status body content-type",
        r"^own route GET /(redoc|docs/oauth2-redirect)$",
    ),
    difference(
        "calls that load adapters",
        "status body content-type",
        r"^own route \w+ (/adapters|/v1/\w+_lora_adapter)",
    ),
    difference("a body with `Content-Encoding`", "status body", r" body packed$"),
    difference(
        "routes that need the key",
        "status body content-type www-authenticate allow",
        r"(no key|wrong key|another scheme)$(?<!health no key)",
    ),
    difference("the id of an error of Cohere's chat", "body", r"^/cohere/v2/chat no id$"),
    difference("`/server_info`", "body", r"^GET /server_info$"),
    difference(
        "`/collective_rpc` and weight updates that fail",
        "body",
        r"^/collective_rpc of no method|^/\w+_weight_update done",
    ),
    difference("bytes that are not HTTP", "body content-type", r" by BREW$"),
    difference("white space after a header's value", "status body", r" as .*json $"),
    difference("a refused grammar", "body", r" structured_outputs wrong$"),
    difference(
        "a body on which vLLM's validators fail", "status body", r" on which validators fail"
    ),
    difference(
        "a batch of chats with `stream`",
        "status body",
        r"^/v1/chat/completions/batch (with stream|cut after \d+)$",
    ),
    difference(
        "an unknown field with more than 200 levels, or 32768 values beside token ids",
        "status body",
        r" body (deep|wide) beside$",
    ),
    difference("a body with more than 1024 fields", "status body", r" body many beside$"),
    difference("`/invocations`", "status body content-type", r"^/invocations "),
)


@dataclass(frozen=True)
class Answer:
    """What a client sees; random ids, times and the server's address are taken out."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    closes: bool

    def parts(self, other: "Answer") -> set[str]:
        """Return the names of what differs from another answer."""
        names = {name for name in ("status", "body", "closes")
                 if getattr(self, name) != getattr(other, name)}  # fmt: skip
        headers = self.headers.keys() | other.headers.keys()
        return names | {
            name for name in headers if self.headers.get(name) != other.headers.get(name)
        }


_UUID: Final = rb"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"
_TAKEN_OUT: Final = (
    (re.compile(rb'("(?:created|created_at|completed_at)": ?)[0-9.]+'), rb"\1T"),
    (
        re.compile(rb"(\d\.\d{3})\d+(?![\d.e])"),
        rb"\1",
    ),  # how texts are batched moves the last digits
    (re.compile(_UUID), b"N"),
    (re.compile(rb'(?<=[-_"])[0-9a-f]{16,32}(?=["-])'), b"N"),
)
# The text that an event of a stream adds, and the number of an event of the Responses API.
_ADDED: Final = re.compile(
    rb'("delta":\{"content":|"delta":\{"type":"text_delta","text":|"delta":|'
    rb'"choices":\[\{"index":[0-9]+,"text":)"((?:[^"\\]|\\.)*)"'
)
# A busy server joins tokens, also those before the last one with the last.
_FINISH: Final = re.compile(rb'(?<="finish_reason":)"[a-z_]+"')
_POSITION: Final = re.compile(rb'"sequence_number":[0-9]+')


def comparable(body: bytes) -> bytes:
    """Return a body without what no two answers have in common; a stream's text as one piece."""
    for pattern, replacement in _TAKEN_OUT:
        body = pattern.sub(replacement, body)
    if not body.startswith((b"data: ", b"event: ")):
        return body
    text = b"".join(match[2] for match in _ADDED.finditer(body))
    bare = _POSITION.sub(b"", _ADDED.sub(rb'\1"+"', body))
    groups = itertools.groupby(bare.split(b"\n\n"), partial(_FINISH.sub, b"null"))
    events = [list(group)[-1] for _, group in groups]
    return b"\n\n".join([*events, text])


def ask(url: str, request: Request) -> Answer:
    """Return a server's answer; of one that is cut off, what was read of it."""
    connection = connect(url)
    try:
        connection.request(request.method, request.path, request.body, dict(request.headers))
        response = connection.getresponse()
        closes = response.will_close
        body = response.read() if request.reads is None else response.read(request.reads)
        return Answer(response.status, comparable(body), _headers(response, url), closes)
    finally:
        connection.close()


def _headers(response: http.client.HTTPResponse, url: str) -> dict[str, str]:
    found = {name.lower(): value for name, value in response.getheaders()}
    address = urlsplit(url).netloc
    return {
        name: comparable(value.replace(address, "server").encode()).decode()
        for name, value in found.items()
        if name not in EVERYWHERE
    }


@contextmanager
def vllm_server(
    command: Callable[[int], list[str]], environ: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """The URL of vLLM's own server; one that does not start is not tried again for each test.

    It compiles nothing. Otherwise it would need a C++ compiler for some requests, and end without:
    see `engine/vllm/cpu/compilation.py`. Its worker is in the engine's process, as ours
    is: on a CPU vLLM starts another, and the two look for messages of each other without a pause.
    """
    settings = {"TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environ}
    try:
        with running(command, "/health", settings) as server:
            yield server.url
    except SystemExit as error:
        pytest.fail(str(error))


def expected_difference(name: str) -> Difference | None:
    """Return the row of the table that a request belongs to."""
    found = [row for row in DIFFERENCES if re.search(row.names, name)]
    assert len(found) < 2, found
    return found[0] if found else None


def compare(request: Request, our_url: str, their_url: str) -> None:
    """Ask both servers, and see that nothing differs but what the request's row says.

    A stream is asked for until one of ours is as one of theirs: either may have joined tokens.
    """
    row = expected_difference(request.name)
    allowed = frozenset() if row is None else row.parts
    all_ours: list[Answer] = []
    all_theirs: list[Answer] = []
    for _ in range(ATTEMPTS):
        all_ours.append(ask(our_url, request))
        all_theirs.append(ask(their_url, request))
        ours, theirs = min(
            product(all_ours, all_theirs), key=lambda pair: len(pair[0].parts(pair[1]) - allowed)
        )
        parts = ours.parts(theirs)
        if b"data: " not in theirs.body or parts <= allowed:
            break
    if row is None:
        assert ours == theirs
    else:
        assert parts, f"no longer a difference: {row.case}"
        assert parts <= row.parts
