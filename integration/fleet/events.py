"""What happens to the fleet: a kill -9, a fourth server, a rolling restart, calls by the proxy.

The adapters lie in an S3 server on loopback; each server has a disk of its own.
"""

import http.client
import json
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy
import psutil

from integration.adapters_support import SINGLE_THREAD
from integration.client import Answer, call, wait_until
from integration.conftest import ServerProcess
from integration.fleet.load import Load, ask
from integration.fleet.proxies import PROXIES, free_ports
from tests.support.adapter_files import CAPITALS, CONFIG, WEIGHTS
from tests.support.s3_server import BUCKET, S3Server, s3_server

CALLED: Final = tuple(f"called-{number}" for number in range(8))  # what calls register
LATE_SECONDS: Final = 60.0  # for which a server that is late is watched, to say how late
Start = Callable[..., ServerProcess]


@dataclass(frozen=True)
class Plan:
    """How large it is."""

    proxy: str = "haproxy"
    engine: str = "scripted"
    servers: int = 3
    adapters: int = 24
    clients: int = 4
    streamed: float = 0.0
    requests: int = 20  # between one thing that happens and the next
    refresh_seconds: float = 1.0
    rest_seconds: float = 0.0  # for which S3's calls are counted at the end

    @property
    def is_real(self) -> bool:
        """Whether answers are those of weights."""
        return self.engine != "scripted"

    @property
    def words(self) -> tuple[str, ...]:
        """What is said on the command line of a server."""
        return ("--demo", *(() if self.is_real else ("--engine", self.engine)))


@dataclass
class Found:
    """What was measured."""

    load: Load
    unknown: list[str] = field(default_factory=list)  # server: adapter, after the refresh time
    calls: list[str] = field(default_factory=list)  # what management was answered
    cut_by_kill: list[str] = field(default_factory=list)  # streams: no proxy can repeat them
    memory_mib: list[int] = field(default_factory=list)  # of each server, with its engine
    s3_calls_a_minute: float = 0.0
    servers_at_rest: int = 0


class Fleet:
    """The servers by their ports, and what is done to them."""

    def __init__(self, plan: Plan, start: Start, folder: Path, store: S3Server) -> None:
        self.plan = plan
        self.port, *self.ports = free_ports(plan.servers + 2)
        self.servers: dict[int, ServerProcess] = {}
        self.shared: set[str] = set()  # registered by calls
        self._start = start
        self._folder = folder
        self.store = store
        self._starts = 0

    @property
    def url(self) -> str:
        """The proxy's."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def urls(self) -> list[str]:
        """The servers' own."""
        return [f"http://127.0.0.1:{at}" for at in self.servers]

    def start(self, *ports: int) -> None:
        """Start servers at these ports; return when they are ready."""
        for at in ports:
            self._starts += 1
            environ = {
                **SINGLE_THREAD,
                **self.store.environ,
                "AWS_EC2_METADATA_DISABLED": "true",
                "LMI_S3_CLIENT": "boto3",
                "SERVING_DOWNLOAD_DIR": str(self._folder / f"disk-{self._starts}"),
                "OPTION_ADAPTER_STORE": f"s3://{BUCKET}/lora/",
                "OPTION_ADAPTERS_STATE": f"s3://{BUCKET}/state/adapters.json",
                "OPTION_ADAPTERS_STATE_REFRESH_SECONDS": str(self.plan.refresh_seconds),
                "OPTION_MAX_LORAS": "8",
                "OPTION_MAX_CPU_LORAS": "64",
            }
            self.servers[at] = self._start(*self.plan.words, "--port", str(at), environ=environ)
        for at in ports:
            self.servers[at].url_when_ready()

    def roll(self, at: int) -> None:
        """End a server as a rolling update does, and start another at its port."""
        self.servers[at].process.send_signal(signal.SIGTERM)
        assert self.servers[at].wait_exit(60) == 0
        self.start(at)

    def register(self, name: str, *, wait: bool = False) -> Answer:
        """Register an adapter of the store's by a call, through whichever server answers."""
        source = f"s3://{BUCKET}/called/{name}/"
        path = f"/adapters?name={name}&src={source}&wait={str(wait).lower()}"
        answer = call(self.url, path, method="POST", seconds=120)
        assert answer.status in (200, 202), answer.body
        self.shared.add(name)
        return answer

    def remove(self, name: str, *, wait: bool = False) -> Answer:
        """Remove it again, through whichever server answers."""
        path = f"/adapters/{name}?wait={str(wait).lower()}"
        answer = call(self.url, path, method="DELETE", seconds=120)
        assert answer.status in (200, 202), answer.body
        self.shared.discard(name)
        return answer

    def wrong(self) -> list[str]:
        """Return what servers have that they should not, and lack that they should have."""
        found = []
        for url in self.urls:
            found += [f"{url}: {name}" for name in sorted(called_adapters(url) ^ self.shared)]
        return found

    def wait_until_shared(self, found: "Found") -> None:
        """Note what is wrong when the time for it is over: a period, and two for loads."""
        began = time.monotonic()
        wait_until(lambda: not self.wrong(), 3 * self.plan.refresh_seconds + 2)
        if late := self.wrong():
            found.unknown += late
            wait_until(lambda: not self.wrong(), LATE_SECONDS)
        seconds = time.monotonic() - began
        found.calls.append(f"every server is as shared after {seconds:.1f} s: {not self.wrong()}")


def called_adapters(url: str) -> set[str]:
    """Return which of `CALLED` a server has; its list has pages of 100 and would hide some."""
    return {name for name in CALLED if call(url, f"/adapters/{name}").status == http.client.OK}


def put_adapters(store: S3Server, folder: Path, names: Mapping[str, int]) -> None:
    """Make adapters, each with weights of its own by its seed; below `folder` and in the store."""
    head, shape = _frame()
    bodies = {}
    for name, seed in names.items():
        weights = numpy.random.default_rng(seed).normal(0.0, 0.08, shape).astype("<f4").tobytes()
        files = {WEIGHTS: head + weights, CONFIG: (CAPITALS / CONFIG).read_bytes()}
        place = folder / name
        place.mkdir(parents=True)
        prefix = "called" if name.startswith("called") else "lora"
        for file, body in files.items():
            (place / file).write_bytes(body)
            bodies[f"{prefix}/{name}/{file}"] = body
    store.put(bodies)


def _frame() -> tuple[bytes, int]:
    """Return the head of a file like the embedded adapter's, in float32, and its numbers."""
    raw = (CAPITALS / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    found: dict[str, Any] = json.loads(raw[8 : 8 + length])
    head: dict[str, object] = {}
    offset = 0
    for name, entry in found.items():
        if name == "__metadata__":
            continue
        size = 4 * entry["shape"][0] * entry["shape"][1]
        place = [offset, offset + size]
        head[name] = {"dtype": "F32", "shape": entry["shape"], "data_offsets": place}
        offset += size
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text, offset // 4


def own_answers(start: Start, folder: Path, names: Mapping[str, int]) -> dict[str, str]:
    """Return what each adapter answers alone, on a server of its own that is ended again.

    No two answer alike: an answer that goes to another's request is seen.
    """
    environ = {**SINGLE_THREAD, "OPTION_ADAPTER_STORE": str(folder)}
    server = start("--demo", "--port", "0", environ=environ)
    url = server.url_when_ready()
    answers = {name: ask(url, name).text for name in names}
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(60) == 0
    alike = {text: name for name, text in answers.items()}
    assert len(alike) == len(answers), {*answers} - {*alike.values()}
    return answers


@contextmanager
def running_fleet(plan: Plan, start: Start, folder: Path) -> Iterator[tuple[Fleet, Load]]:
    """Start everything; yields the servers, and the clients that run."""
    names = {f"a{number}": number for number in range(plan.adapters)}
    called = {name: 1000 + number for number, name in enumerate(CALLED)}
    source = folder / "adapters"
    with s3_server() as store:
        put_adapters(store, source, {**names, **called})
        answers = own_answers(start, source, {**names, **called}) if plan.is_real else {}
        fleet = Fleet(plan, start, folder, store)
        with PROXIES[plan.proxy].running(folder, fleet.port, fleet.ports) as url:
            fleet.start(*fleet.ports[: plan.servers])
            assert wait_until(lambda: call(url, "/ready").status == 200, 60)
            yield fleet, Load(url, list(names), answers, plan.clients, plan.streamed)
        for server in fleet.servers.values():  # before the store that they ask
            server.kill()
    shutil.rmtree(source)


def run(plan: Plan, start: Start, folder: Path) -> Found:
    """Have it all happen, and return what was measured."""
    with running_fleet(plan, start, folder) as (fleet, load):
        found = Found(load)
        first, *others = fleet.ports
        with load.running():
            load.wait_for(3 * plan.requests)
            found.memory_mib = [_memory(server) for server in fleet.servers.values()]
            cut = len(load.cut)
            fleet.servers[first].kill()
            load.forget(f"127.0.0.1:{first}")
            load.wait_for(plan.requests)
            found.cut_by_kill, load.cut[cut:] = load.cut[cut:], []
            found.calls.append(_said("registered after a kill", fleet.register("called-0")))
            fleet.register("called-1")
            fleet.start(others[-1])
            load.wait_for(plan.requests)
            fleet.start(first)
            for at in (first, *others[: plan.servers - 1]):
                fleet.register(name := f"called-{fleet.ports.index(at) + 2}")
                fleet.wait_until_shared(found)
                load.ask_also(name)
                load.forget(f"127.0.0.1:{at}")
                fleet.roll(at)
                load.wait_for(plan.requests)
            fleet.remove("called-1")
            fleet.wait_until_shared(found)
            load.wait_for(plan.requests)
            found.calls.append(_said("removed", fleet.remove("called-0", wait=True)))
            found.unknown += fleet.wrong()
        _ask_everything(fleet, load, found)
        _count_calls(fleet, found)
        return found


def _said(what: str, answer: Answer) -> str:
    return f"{what}: {answer.status} {answer.body.decode().strip()}"


def _memory(server: ServerProcess) -> int:
    processes = [psutil.Process(server.process.pid), *server.children()]
    return sum(one.memory_full_info().pss for one in processes) >> 20


def _ask_everything(fleet: Fleet, load: Load, found: Found) -> None:
    """Have every server answer for every adapter, and compare; without weights for the shared."""
    names = {*(load.names if fleet.plan.is_real else ()), *fleet.shared}

    def ask_all(url: str) -> None:
        for name in names:
            try:
                load.compare(name, ask(url, name))
            except Exception as error:  # noqa: BLE001 (whatever it is, the adapter was not had)
                found.unknown.append(f"{url}: {name}: {error!r}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(ask_all, fleet.urls))


def _count_calls(fleet: Fleet, found: Found) -> None:
    if not fleet.plan.rest_seconds:
        return
    signed = fleet.store.signed
    before, began = len(signed), time.monotonic()
    time.sleep(fleet.plan.rest_seconds)
    found.s3_calls_a_minute = (len(signed) - before) / (time.monotonic() - began) * 60
    found.servers_at_rest = len(fleet.servers)
