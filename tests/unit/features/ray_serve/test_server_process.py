"""The server of a replica: a real child, which says why it ended and never outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from integration.client import wait_until
from lmi_vllm.features.ray_serve.relay import Relay
from lmi_vllm.features.ray_serve.server_process import ServerEndedError, ServerProcess

SCRIPTED = ["--demo", "--engine", "scripted"]
WAIT = 60.0
PARENT = """
import os, sys, time
from lmi_vllm.features.ray_serve.server_process import ServerProcess
server = ServerProcess(["--demo", "--engine", "scripted"], os.environ)
print(server._process.pid, server.socket, flush=True)
time.sleep(600)
"""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition without holding up the event loop."""
    assert await asyncio.to_thread(wait_until, condition, WAIT)


async def ready_server(words: list[str]) -> tuple[ServerProcess, Relay]:
    """Return a server that answers, and a relay to it."""
    server = ServerProcess(words, os.environ)
    relay = Relay(server.socket)
    try:
        async with asyncio.timeout(WAIT):
            while (await relay.get("/ready"))[0] != 200:
                server.check_runs()
                await asyncio.sleep(0.1)
    except BaseException:
        await relay.close()
        raise
    return server, relay


async def test_failed_start_has_its_reason() -> None:
    """What the server says last is what Ray shows, and not the end of a replica."""
    with pytest.raises(ServerEndedError, match=r"code 1: --max-modl-len: .*closest names: --max-"):
        await ready_server([*SCRIPTED, "--max-modl-len", "5"])


async def test_socket_counts_beside_another_address_and_an_end_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGTERM, exit code 0, and no folder is left; the end is not reported as one of its own."""
    monkeypatch.setenv("SERVING_INFERENCE_ADDRESS", "http://127.0.0.1:1")
    server, relay = await ready_server([*SCRIPTED, "--port", "1"])
    told: list[str] = []
    server.on_end = told.append
    await relay.close()
    await server.end(WAIT)
    assert not Path(server.socket).parent.exists()
    with pytest.raises(ServerEndedError, match="code 0"):
        server.check_runs()
    assert told == []


async def test_end_of_its_own_is_told_at_once() -> None:
    """So that the replica can end with it."""
    server, relay = await ready_server(SCRIPTED)
    told: list[str] = []
    server.on_end = told.append
    server._process.send_signal(signal.SIGKILL)
    await until(lambda: bool(told))
    assert told == ["the server of this replica ended with code -9: it gave no reason"]
    assert (await relay.get("/health"))[0] == 0
    await relay.close()


def start_and_fail() -> None:
    """Another replica of this node, whose server refuses its command line."""
    server = ServerProcess([*SCRIPTED, "--max-modl-len", "5"], os.environ)
    assert wait_until(lambda: not Path(server.socket).parent.exists(), WAIT)


def test_killed_replica_leaves_no_server_and_the_next_no_folder() -> None:
    """Ray gives the GPUs to another replica at once, which removes the folder of this one."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        number, socket = parent.stdout.readline().decode().split()
        server, folder = psutil.Process(int(number)), Path(socket).parent
        assert wait_until(lambda: "Listening" in parent.stdout.readline().decode(), WAIT)
        start_and_fail()
        assert folder.exists()  # it is a living replica's
        parent.kill()
        assert wait_until(lambda: not server.is_running(), 10)
    start_and_fail()
    assert not folder.exists()
