"""vLLM's own server and ours, with the same model and arguments, answer every request alike.

Status, headers and bytes of the body: whatever a client can see, but for the differences that are
meant (integration/comparison.py).
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from integration.bench.servers import their_command
from integration.client import running_requests, wait_until
from integration.compared_requests import (
    HOT,
    JSON,
    METHODS,
    Request,
    pooling_requests,
    requests,
)
from integration.compared_switches import (
    SEQUENCES,
    classed_requests,
    coded_requests,
    heard_requests,
    keyless_requests,
    sequence,
    switched_requests,
)
from integration.comparison import (
    DIFFERENCES,
    PAGE,
    Difference,
    compare,
    expected_difference,
    vllm_server,
)
from integration.conftest import RunningServer
from lmi_vllm.config.vllm_schema import installed_version
from tests.support.vllm_routes import script

pytestmark = pytest.mark.vllm
REQUESTS: Final = requests()
EVERYTHING: Final = (
    *REQUESTS, *pooling_requests(), *switched_requests(), *keyless_requests(),
    *heard_requests(b""), *classed_requests(), *coded_requests(),
    *(each for name in SEQUENCES for each in sequence(name)),
)  # fmt: skip
PAGE_OF_ROUTES: Final = script("vllm_routes_page")
RELEASE: Final = ".".join(str(installed_version()).split(".")[:2])
# Two are there with data parallelism behind a load balancer only, one is a WebSocket.
NOT_ASKED: Final = ("/fault_tolerance/apply", "/fault_tolerance/status", "/v1/realtime")


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
            "--gpu-memory-utilization", "0.05",  # of which it asks for all, free at its start
        ]  # fmt: skip

    with vllm_server(command) as url:
        yield url


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: each.name)
def test_answers_are_equal(request_: Request, demo_server: RunningServer, vllm_url: str) -> None:
    """Where they are to differ, they do, and in nothing else."""
    compare(request_, demo_server.url, vllm_url)


@pytest.mark.parametrize("request_", pooling_requests(), ids=lambda each: each.name)
def test_answers_of_a_model_that_embeds_are_equal(
    request_: Request, embedding_server: RunningServer, vllm_pooling_url: str
) -> None:
    """It has other routes."""
    compare(request_, embedding_server.url, vllm_pooling_url)


def test_there_are_enough_requests() -> None:
    """Every row of the table has one."""
    assert len(EVERYTHING) >= 2000
    assert set(DIFFERENCES) <= {expected_difference(request.name) for request in EVERYTHING}


def test_every_route_of_the_release_is_asked_in_every_way() -> None:
    """By each method; inference as each content type, unreadable, streamed and cut off."""
    missing = []
    for path, row in sorted(PAGE_OF_ROUTES.recorded()[RELEASE].items()):
        answer = PAGE_OF_ROUTES.answers()[path]
        if path in NOT_ASKED:
            continue
        pattern = re.compile(re.sub(r"{\w+}", "[^/]+", path))
        asked = [each for each in EVERYTHING if pattern.fullmatch(each.path.partition("?")[0])]
        ways = {each.method for each in asked}
        if answer["by"] != "bridge" and path not in HOT:
            missing += [(path, way) for way in {*row["methods"]} - ways]
            continue
        wanted = {*METHODS}
        if row["methods"] == ["POST"] and answer.get("acts", "inference") == "inference":
            ways |= {each.headers.get("Content-Type") for each in asked}
            ways |= {"cut" for each in asked if each.reads is not None}
            ways |= {"stream" for each in asked if b"stream" in (each.body or b"")}
            ways |= {"whole" for each in asked if each.name.endswith(" whole")}
            ways |= {
                "unreadable" for each in asked if each.name.endswith((" body cut", " form cut"))
            }
            wanted |= {None, "text/plain", "application/x-www-form-urlencoded", JSON}
            wanted |= {"cut", "stream", "whole", "unreadable"}
        missing += [(path, way) for way in wanted - ways]
    assert not missing


@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: row.case)
def test_difference_is_documented(row: Difference) -> None:
    """In the page's list, in the words of the table."""
    assert f"| {row.case} |" in PAGE.read_text(encoding="utf-8")


def test_disconnected_requests_are_aborted(demo_server: RunningServer, vllm_url: str) -> None:
    """From both servers."""
    for url in (demo_server.url, vllm_url):
        assert wait_until(lambda url=url: not running_requests(url), 30)  # type: ignore[misc]
