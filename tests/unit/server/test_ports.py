"""A socket file belongs to the server that answers on it."""

import socket
from pathlib import Path

import pytest
from aiohttp import ClientSession, UnixConnector, web
from aiohttp.test_utils import TestClient

from lmi_vllm.config.listen import ListenAddress
from lmi_vllm.errors import StartupError
from lmi_vllm.server.ports import open_port
from lmi_vllm.web.request import SERVICE, WebOptions
from tests.conftest import ServeScripted


async def _opened(client: TestClient, path: Path) -> web.AppRunner:
    address = ListenAddress("unix", path=str(path))
    runner, _ = await open_port(address, client.app[SERVICE], WebOptions(), None)
    return runner


async def _status(path: Path) -> int:
    async with (
        ClientSession(connector=UnixConnector(str(path))) as session,
        session.get("http://localhost/ping") as answer,
    ):
        return answer.status


async def test_socket_of_a_running_server_is_taken(serve: ServeScripted, tmp_path: Path) -> None:
    """The second server ends, and the first one keeps its clients."""
    client, path = await serve(), tmp_path / "s"
    first = await _opened(client, path)
    with pytest.raises(StartupError, match=r"cannot listen on unix:.*ddress already in use"):
        await _opened(client, path)
    assert await _status(path) == 200
    await first.cleanup()


async def test_socket_of_a_killed_server_is_replaced(serve: ServeScripted, tmp_path: Path) -> None:
    """Nothing answers on it, so it is in no one's way."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    runner = await _opened(await serve(), path)
    assert await _status(path) == 200
    await runner.cleanup()


async def test_another_file_is_not_replaced(serve: ServeScripted, tmp_path: Path) -> None:
    """A wrong path must not cost a file."""
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(StartupError, match="cannot listen on unix:"):
        await _opened(await serve(), path)
    assert path.read_text() == "mine"


async def test_socket_goes_with_its_server(serve: ServeScripted, tmp_path: Path) -> None:
    """Nothing is left after an end in order; the socket of a later server is not touched."""
    client, path = await serve(), tmp_path / "s"
    first = await _opened(client, path)
    await first.cleanup()
    assert not path.exists()
    first = await _opened(client, path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as later:
        later.bind(str(path))
        await first.cleanup()
        assert path.exists()
