"""vLLM's own server and ours, with the same model and arguments, answer every request alike.

Status, headers and bytes of the body: whatever a client can see, but for the differences that are
meant (integration/comparison.py).
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from integration.bench.servers import their_command
from integration.client import running_requests, wait_until
from integration.compared_requests import Request, pooling_requests, requests
from integration.compared_switches import (
    classed_requests,
    heard_requests,
    keyless_requests,
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

pytestmark = pytest.mark.vllm
REQUESTS: Final = requests()


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
    """Of every route, and every row of the table has one."""
    everything = (
        *REQUESTS, *pooling_requests(), *switched_requests(), *keyless_requests(),
        *heard_requests(b""), *classed_requests(),
    )  # fmt: skip
    assert len(everything) >= 1400
    assert set(DIFFERENCES) <= {expected_difference(request.name) for request in everything}


@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: row.case)
def test_difference_is_documented(row: Difference) -> None:
    """In the page's list, in the words of the table."""
    assert f"| {row.case} |" in PAGE.read_text(encoding="utf-8")


def test_disconnected_requests_are_aborted(demo_server: RunningServer, vllm_url: str) -> None:
    """From both servers."""
    for url in (demo_server.url, vllm_url):
        assert wait_until(lambda url=url: not running_requests(url), 30)  # type: ignore[misc]
