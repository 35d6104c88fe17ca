"""vLLM's own server and ours, with the same model and arguments, answer every request alike.

Status, headers and bytes of the body: whatever a client can see, but for the differences that are
meant. They are a table here, each with its reason, and in docs/requests.md.
"""

import http.client
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

from integration.bench.servers import running, their_command
from integration.client import connect, running_requests, wait_until
from integration.compared_requests import Request, pooling_requests, requests
from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm

PAGE: Final = Path(__file__).parent.parent / "docs" / "requests.md"
ATTEMPTS: Final = 5  # at a stream: on a busy machine vLLM joins tokens that were not fetched
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

    reason: str  # as the page says it
    parts: frozenset[str]
    names: str  # of requests, as a regular expression


def difference(reason: str, parts: str, names: str) -> Difference:
    """Return a row of the table."""
    return Difference(reason, frozenset(parts.split()), names)


DIFFERENCES: Final = (
    difference(
        "A path that neither server has is refused in our words",
        "body content-type",
        r" (in front|capitals|dots|below|without /v1|no such route)$|(?<=/)nothing$"
        r"|^GET /v\d(/|/no|/models/x)?$",
    ),
    difference(
        "`Location` is relative",
        "location",
        r" (slash|two slashes|slash and query)$|^GET /(v1/models|version|load)/$",
    ),
    difference(
        "Without a configured origin a preflight is a plain `OPTIONS`",
        "status body content-type allow access-control-allow-methods access-control-max-age "
        "access-control-allow-headers",
        r"preflight",
    ),
    difference("`/health` says more", "body content-type", r"^GET /health$"),
    difference("Bytes that are no HTTP", "body content-type", r" by BREW$"),
    difference(
        "White space at the end of a header's value is dropped", "status body", r" as .*json $"
    ),
    difference("A refused grammar is called one", "body", r" structured_outputs wrong$"),
    difference(
        "A body that vLLM's own checks stumble over is 400", "status body", r" stumbled over"
    ),
    difference(
        "Where no name is configured, some refusals name the model's path",
        "body",
        r" own message of a picture$|/embeddings dimensions$",
    ),
    difference("`/invocations` is LMI's", "status body content-type", r"^/invocations "),
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
    (re.compile(rb'(?<=[-_"])[0-9a-f]{16,32}(?=")'), b"N"),
)
# The text that an event of a stream adds, and the number of an event of the Responses API.
_ADDED: Final = re.compile(
    rb'("delta":\{"content":|"delta":\{"type":"text_delta","text":|"delta":|'
    rb'"choices":\[\{"index":[0-9]+,"text":)"((?:[^"\\]|\\.)*)"'
)
_POSITION: Final = re.compile(rb'"sequence_number":[0-9]+')


def comparable(body: bytes) -> bytes:
    """Return a body without what no two answers have in common; a stream's text as one piece."""
    for pattern, replacement in _TAKEN_OUT:
        body = pattern.sub(replacement, body)
    if not body.startswith((b"data: ", b"event: ")):
        return body
    text = b"".join(match[2] for match in _ADDED.finditer(body))
    bare = _POSITION.sub(b"", _ADDED.sub(rb'\1"+"', body))
    events = [event for event, _ in itertools.groupby(bare.split(b"\n\n"))]
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
def vllm_server(command: Callable[[int], list[str]]) -> Iterator[str]:
    """The URL of vLLM's own server; one that does not start is not tried again for each test."""
    try:
        with running(command, "/health") as server:
            yield server.url
    except SystemExit as error:
        pytest.fail(str(error))


@pytest.fixture(scope="module")
def vllm_url() -> Iterator[str]:
    """`vllm serve` over the embedded model, with the arguments of its serving.properties."""
    with vllm_server(their_command) as url:
        yield url


@pytest.fixture(scope="module")
def vllm_pooling_url(embedding_folder: Path) -> Iterator[str]:
    """`vllm serve` over the model of our server that embeds."""

    def command(port: int) -> list[str]:
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port),
            "--host", "127.0.0.1", "--model", str(embedding_folder), "--served-model-name", "lmi",
            "--dtype", "float32", "--enforce-eager", "--convert", "embed",
            "--gpu-memory-utilization", "0.2",  # of which it asks for all, free at its start
        ]  # fmt: skip

    with vllm_server(command) as url:
        yield url


REQUESTS: Final = requests()


def meant(name: str) -> Difference | None:
    """Return the row of the table that a request belongs to."""
    found = [row for row in DIFFERENCES if re.search(row.names, name)]
    assert len(found) < 2, found
    return found[0] if found else None


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: each.name)
def test_answers_are_alike(request_: Request, demo_server: RunningServer, vllm_url: str) -> None:
    """Where they are to differ, they do, and in nothing else."""
    compare(request_, demo_server.url, vllm_url)


@pytest.mark.parametrize("request_", pooling_requests(), ids=lambda each: each.name)
def test_answers_of_a_model_that_embeds_are_alike(
    request_: Request, embedding_server: RunningServer, vllm_pooling_url: str
) -> None:
    """It has other routes."""
    compare(request_, embedding_server.url, vllm_pooling_url)


def compare(request: Request, our_url: str, their_url: str) -> None:
    """Ask both servers, and see that nothing differs but what the request's row says."""
    row = meant(request.name)
    for attempt in range(ATTEMPTS):
        ours, theirs = ask(our_url, request), ask(their_url, request)
        parts = ours.parts(theirs)
        if b"data: " not in theirs.body or not parts or attempt == ATTEMPTS - 1:
            break
    if row is None:
        assert ours == theirs
    else:
        assert parts, f"no longer a difference: {row.reason}"
        assert parts <= row.parts


def test_there_are_enough_requests() -> None:
    """Of every route, and every row of the table has one."""
    assert len(REQUESTS) + len(pooling_requests()) >= 400
    found = {meant(request.name) for request in REQUESTS}
    assert set(DIFFERENCES) <= found


@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: row.reason)
def test_difference_is_documented(row: Difference) -> None:
    """In the page's list, in the words of the table."""
    assert f"- {row.reason}" in PAGE.read_text(encoding="utf-8")


def test_requests_whose_client_went_are_gone(demo_server: RunningServer, vllm_url: str) -> None:
    """From both servers."""
    for url in (demo_server.url, vllm_url):
        assert wait_until(lambda url=url: not running_requests(url), 30)  # type: ignore[misc]
