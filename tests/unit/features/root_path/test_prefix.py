"""A prefix in front of paths, with which a request means what it means without."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, UnixConnector
from aiohttp.test_utils import TestClient

from lmi_vllm.config.listen import ListenAddress
from lmi_vllm.features.root_path.prefix import below, root_path_of
from lmi_vllm.server.ports import open_port
from lmi_vllm.web.request import SERVICE, WebOptions
from tests.conftest import ServeScripted


@pytest.fixture
async def url(serve: ServeScripted) -> AsyncIterator[str]:
    """A port with the prefix `/api`."""
    client: TestClient = await serve()
    options = WebOptions(prefix=below("/api"))
    runner, address = await open_port(
        ListenAddress("http", "127.0.0.1", 0), client.app[SERVICE], options, None
    )
    yield address.url()
    await runner.cleanup()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/ping", 200),
        ("/api/ping", 200),
        ("/api/ping?x=1", 200),
        ("/api/api/ping", 404),
        ("/apiping", 404),
        ("/apis/ping", 404),
        ("/api/nothing", 404),
        ("/api//ping", 404),
        ("/api//host/ping", 404),
        ("/api//a:b/ping", 404),
        ("/api//[x/ping", 404),
    ],
)
async def test_prefix_is_taken_away_once(url: str, path: str, status: int) -> None:
    """And only where it is a prefix."""
    async with ClientSession() as session, session.get(f"{url}{path}") as answer:
        assert answer.status == status


@pytest.mark.parametrize("path", ["/api", "/api/", "/api?a=b"])
async def test_prefix_alone_is_the_front_page(url: str, path: str) -> None:
    """As `/` is."""
    async with ClientSession() as session:
        async with session.get(f"{url}/") as front:
            wanted = front.status, await front.read()
        async with session.get(f"{url}{path}") as answer:
            assert (answer.status, await answer.read()) == wanted


async def test_body_query_and_escapes_arrive(url: str) -> None:
    """As they were sent."""
    async with ClientSession() as session:
        asked = session.post(f"{url}/api/invocations", json={"inputs": "x"})
        async with asked as answer:
            assert answer.status == 200
            assert b"generated_text" in await answer.read()


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, ""), ("", ""), ("/", ""), ("api", "/api"), ("/api/", "/api"), ("/a/b", "/a/b")],
)
def test_prefix_begins_with_a_slash(text: str | None, found: str) -> None:
    """And ends with none."""
    assert root_path_of(text) == found


async def test_prefix_is_taken_away_once_behind_another_process(
    serve: ServeScripted, tmp_path: Path
) -> None:
    """What comes over the socket between them is without it already."""
    client: TestClient = await serve()
    inner = str(tmp_path / "inner")
    options = WebOptions(prefix=below("/api"))
    address = ListenAddress("http", "127.0.0.1", 0)
    runner, _ = await open_port(address, client.app[SERVICE], options, None, inner)
    async with ClientSession(connector=UnixConnector(inner)) as session:
        found = [
            (await session.get(f"http://inner{path}")).status for path in ("/ping", "/api/ping")
        ]
    await runner.cleanup()
    assert found == [200, 404]
