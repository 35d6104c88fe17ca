"""The template of front ends: what a forked process has of the server, and how all of them end."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration.processes_of_a_server import template_of
from lmi_vllm.features.front_ends import starts, template
from lmi_vllm.features.front_ends.starts import FrontEndChild, FrontEndStarts
from lmi_vllm.telemetry.log_handler import QueuedHandler

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="several front ends are Linux only"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
SECONDS = 30
CHANNELS: list[socket.socket] = []  # of the processes of one test


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork a small program, and without vLLM and torch; close its channels."""
    monkeypatch.setattr(template, "PROGRAM", "tests.support.forked_program")
    monkeypatch.setattr(template, "renew_random_numbers", lambda: None)
    monkeypatch.setattr(starts, "why_not_forked", lambda: "")
    yield
    while CHANNELS:
        CHANNELS.pop().close()


@pytest.fixture
async def begun() -> AsyncIterator[FrontEndStarts]:
    """What starts front ends, with its template."""
    made = FrontEndStarts()
    made.begin()
    yield made
    made.close()


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Return the channels of those that would have been spawned."""
    found: list[socket.socket] = []

    async def spawn(end: socket.socket) -> None:
        found.append(end)

    monkeypatch.setattr(starts, "_spawn", spawn)
    return found


class Begun:
    """A process that was started, its report, and our end of its channel."""

    def __init__(self, process: FrontEndChild, channel: socket.socket, report: Any) -> None:
        self.process = process
        self.channel = channel
        self.report = report


async def begin(made: FrontEndStarts) -> Begun:
    """Return a new process that has reported."""
    ours, theirs = socket.socketpair()
    has_begun = asyncio.Event()
    with theirs:
        process = await made.start(theirs, has_begun)
    ours.setblocking(False)
    CHANNELS.append(ours)
    text = b""
    while not text.endswith(b"\n"):
        block = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 1 << 16), SECONDS)
        assert block, "the process ended"
        text += block
    has_begun.set()
    return Begun(process, ours, json.loads(text))


async def ended(process: FrontEndChild) -> int:
    """Return the exit code."""
    return await asyncio.wait_for(process.wait(), SECONDS)


async def test_forked_process_has_no_file_of_the_server(tmp_path: Path) -> None:
    """Its channel and the standard streams are all; a lock would remove folders with its end."""
    with (tmp_path / ".lock").open("wb"), socket.create_server(("127.0.0.1", 0)):
        made = FrontEndStarts()
        made.begin()
        one, two = await begin(made), await begin(made)
    for each in (one, two):
        files = each.report["files"]
        kept = {number: link for number, link in files.items() if link != os.devnull}
        assert files["0"] == os.devnull
        # Both ends of a pipe are libuv's, of the child, where another test has loaded uvloop.
        links = [*kept.values()]
        (channel,) = {n for n, link in kept.items() if links.count(link) == 1} - {"1", "2"}
        assert kept[channel].startswith("socket:")
    assert one.report["files"] != two.report["files"]
    made.close()


async def test_forked_process_begins_as_a_new_interpreter_does() -> None:
    """No handler of signals, no loop, random numbers of its own; a session, and its parent."""
    loop, made = asyncio.get_running_loop(), FrontEndStarts()
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    made.begin()
    one, two = await begin(made), await begin(made)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    loop.remove_signal_handler(signal.SIGHUP)
    report = one.report
    assert report["parent"] == two.report["parent"] == os.getpid()
    assert report["session"] == one.process.pid
    assert (report["handlers"], report["blocked"]) == ([], sorted(before))
    assert (report["ignored"], report["wakeup"], report["loop"]) == (True, -1, False)
    assert report["drawn"] != two.report["drawn"]
    made.close()


async def test_ends_are_told_as_they_were(begun: FrontEndStarts) -> None:
    """With its own code, or by the signal; another one is forked by the same template."""
    one, two = await begin(begun), await begin(begun)
    template_pid = only_template().pid
    one.channel.close()
    assert await ended(one.process) == 7
    two.process.kill()
    assert await ended(two.process) == -signal.SIGKILL
    assert await ended(two.process) == -signal.SIGKILL
    two.process.kill()  # its number may be another's: nothing is sent
    await begin(begun)
    assert only_template().pid == template_pid


def only_template() -> psutil.Process:
    """Return the template that this process has forked; it gets its name a moment later."""
    end = time.monotonic() + SECONDS
    while (found := template_of(os.getpid())) is None:
        assert time.monotonic() < end, "no template"
        time.sleep(0.01)
    return found


async def test_nothing_of_other_processes_is_left_here(begun: FrontEndStarts) -> None:
    """Only a front end is handed over, and only while one is forked."""
    await begin(begun)
    orphaning = "import os, time; print(os.fork() or time.sleep(30), flush=True)"
    with psutil.Popen([sys.executable, "-c", orphaning], stdout=-1, text=True) as between:
        orphan = psutil.Process(int(between.stdout.readline()))
        between.wait(SECONDS)
        try:
            assert orphan.ppid() != os.getpid()
        finally:
            orphan.kill()


async def test_what_the_template_forked_outlives_it(
    begun: FrontEndStarts, spawned: list[socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    """And further ones are spawned."""
    one = await begin(begun)
    only_template().kill()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        await begun.start(theirs, asyncio.Event())
    assert spawned == [theirs]
    assert "the template of front-end processes has ended: others are spawned" in caplog.text
    begun.close()
    one.channel.close()
    assert await ended(one.process) == 7


async def test_template_that_hangs_is_ended(
    begun: FrontEndStarts,
    spawned: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a process is spawned in the place of the one that it was asked for."""
    monkeypatch.setattr(starts, "FORK_SECONDS", 0.2)
    stopped = only_template()
    stopped.suspend()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with asyncio.timeout(SECONDS):
            await begun.start(theirs, asyncio.Event())
    assert spawned == [theirs]
    assert not stopped.is_running()
    assert "the template of front-end processes hangs: it is ended" in caplog.text


@pytest.mark.parametrize(
    "cause", ["reason", "no room for the template", "no room", "not handed over"]
)
async def test_where_none_is_forked_it_is_spawned(
    cause: str,
    spawned: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says why."""
    caplog.set_level(logging.INFO)

    def fail() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    if cause == "reason":
        monkeypatch.setattr(starts, "why_not_forked", lambda: "threads of gRPC run here")
    elif cause == "no room":
        monkeypatch.setattr(template, "_fork_apart", lambda: (template.NOT_FORKED, 0))
    elif cause == "not handed over":  # as where a sandbox only says that it adopts orphans
        monkeypatch.setattr(starts, "_adopt_orphans", lambda _: None)
        monkeypatch.setattr(starts, "ForkedFrontEnd", lambda _: fail())
    else:
        monkeypatch.setattr(starts, "fork_template", fail)
    made = FrontEndStarts()
    made.begin()
    made.begin()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        await made.start(theirs, asyncio.Event())
        assert spawned == [theirs]
    made.close()
    said = {
        "reason": "threads of gRPC",
        "no room": "",
        "not handed over": "the template of front-end processes has ended",
    }.get(cause, "Resource temporarily")
    is_before = cause in ("reason", "no room for the template")
    assert caplog.text.count("spawned and import vLLM again: ") == is_before
    assert said in caplog.text


async def test_process_that_does_not_begin_is_ended(
    begun: FrontEndStarts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would hang the start, and so would the next one."""
    monkeypatch.setattr(starts, "BEGIN_SECONDS", 0.2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await begun.start(theirs, asyncio.Event())
        assert await ended(process) == -signal.SIGKILL
    assert "was forked and does not begin" in caplog.text


@contextlib.contextmanager
def busy_logs(path: Path) -> Iterator[None]:
    """Have four threads log without pause."""
    stop = threading.Event()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    handler, root = QueuedHandler(descriptor), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)

    def write() -> None:
        while not stop.is_set():
            logging.getLogger("busy").info("a line %s", "x" * 50)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        root.removeHandler(handler)
        root.setLevel(level)
        handler.flush()
        os.close(descriptor)


async def test_lock_of_a_thread_that_logs_holds_no_child(tmp_path: Path) -> None:
    """Forked in the middle of its lines: each process logs and answers."""
    for turn in range(10):
        with busy_logs(tmp_path / f"log-{turn}"):
            made = FrontEndStarts()
            made.begin()
        one = await begin(made)
        one.channel.close()
        assert await ended(one.process) == 7
        made.close()


def test_server_that_is_killed_takes_all_along() -> None:
    """The kernel ends the template and the front ends with the server.

    Their sockets stay open: the engine was forked in between, and has copies of the other ends.
    """
    script = f"""
import asyncio, os, sys, time
sys.path.insert(0, {str(Path.cwd())!r})
from tests.unit.features.front_ends import test_template as here
from lmi_vllm.features.front_ends import starts, template
template.PROGRAM = "tests.support.forked_program"
template.renew_random_numbers = lambda: None
starts.why_not_forked = lambda: ""
async def main():
    made = here.FrontEndStarts()
    made.begin()
    found = [await here.begin(made) for _ in range(2)]
    if (engine := os.fork()) == 0:
        time.sleep({SECONDS})
        os._exit(0)
    pids = (one.process.pid for one in found)
    print(engine, here.only_template().pid, *pids, flush=True)
    await asyncio.sleep({SECONDS})
asyncio.run(main())
"""
    with psutil.Popen([sys.executable, "-c", script], stdout=-1, text=True) as server:
        pids = [int(word) for word in server.stdout.readline().split()]
        assert len(pids) == 4
        engine, *seen = [psutil.Process(pid) for pid in pids]
        server.kill()
        try:
            assert not psutil.wait_procs(seen, 10)[1]
        finally:
            engine.kill()
