"""Three servers behind HAProxy, 40 adapters in S3: killed, rolled, joined by a fourth, under load.

Proves with the scripted engine that no request is lost (the proxy tries 503 and cut connections on
another server), that each is answered by the adapter it names, and that what calls register through
the proxy is known to every server in the end. Run with `-s` it prints what it measured.
"""

import random
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from integration.client import call
from integration.conftest import ServerProcess, StartServer
from integration.replicas_share_adapters import until
from tests.support.adapter_files import CAPITALS
from tests.support.s3_server import BUCKET, S3Server, s3_server

pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="needs haproxy: apt-get install haproxy"
)

ADAPTERS = 40
CLIENTS = 4
CONFIGURATION = """
defaults
  mode http
  timeout connect 2s
  timeout client 120s
  timeout server 120s
  retries 10
  retry-on all-retryable-errors
  option http-buffer-request
  option redispatch 1
frontend everybody
  bind 127.0.0.1:{port}
  default_backend servers
backend servers
  balance roundrobin
  option httpchk GET /ready
  http-check expect status 200
"""


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def proxy(folder: Path, port: int, servers: list[int]) -> Iterator[str]:
    """Run HAProxy in front of the servers; yields its URL."""
    lines = [
        f"  server s{at} 127.0.0.1:{at} check inter 300ms fall 2 rise 1 observe layer4"
        for at in servers
    ]
    file = folder / "haproxy.cfg"
    file.write_text(CONFIGURATION.format(port=port) + "\n".join(lines) + "\n")
    running = subprocess.Popen(["haproxy", "-db", "-f", str(file)], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()


@dataclass
class Load:
    """Clients that name adapters by Zipf's law until they are stopped."""

    url: str
    statuses: Counter[int] = field(default_factory=Counter)
    crossed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"first": [], "again": []})
    _over: threading.Event = field(default_factory=threading.Event)
    _seen: set[str] = field(default_factory=set)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask while the body runs."""
        threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def wait_for(self, more: int) -> None:
        """Return when so many more have been answered."""
        goal = self.statuses.total() + more
        until(lambda: self.statuses.total() >= goal, 120)

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        weights = [1 / (rank + 1) for rank in range(ADAPTERS)]
        while not self._over.is_set():
            (number,) = draw.choices(range(ADAPTERS), weights)
            name = f"a{number}"
            kind = "again" if name in self._seen else "first"
            began = time.monotonic()
            body = {"prompt": "x", "model": name, "max_tokens": 1}
            try:
                answer = call(self.url, "/v1/completions", body, seconds=120)
            except OSError as error:
                self.lost.append(repr(error))
                continue
            self.statuses[answer.status] += 1
            if answer.status != 200:
                self.lost.append(answer.body.decode())
            elif answer.json()["model"] != name:
                self.crossed.append(f"{name}: {answer.json()['model']}")
            self._seen.add(name)
            self.seconds[kind].append(time.monotonic() - began)


def report(load: Load, store: S3Server) -> None:
    """Print what was measured, for those who ask with `-s`."""
    print(f"\nrequests {load.statuses.total()}, lost {len(load.lost)}, crossed {len(load.crossed)}")
    for kind, seconds in load.seconds.items():
        cuts = statistics.quantiles(seconds, n=100)
        print(f"{kind}: p50 {cuts[49] * 1000:.0f} ms, p99 {cuts[98] * 1000:.0f} ms")
    before, began = len(store.signed), time.monotonic()
    time.sleep(10)
    calls = (len(store.signed) - before) / (time.monotonic() - began) * 60
    print(f"S3 calls a minute at rest, all servers: {calls:.0f}")


def test_fleet_loses_no_request_and_crosses_no_adapter(
    server_process: StartServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A kill -9, a rolling restart, a fourth server, calls through whichever answers."""
    port, *ports = free_ports(5)
    with s3_server() as store, proxy(tmp_path, port, ports) as url:
        files = {file.name: file.read_bytes() for file in CAPITALS.iterdir() if file.is_file()}
        store.put({f"lora/a{number}/{name}": body for number in range(ADAPTERS)
                   for name, body in files.items()})  # fmt: skip
        environ = {
            **store.environ,
            "AWS_EC2_METADATA_DISABLED": "true",
            "LMI_S3_CLIENT": "boto3",
            "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
            "OPTION_ADAPTER_STORE": f"s3://{BUCKET}/lora/",
            "OPTION_ADAPTERS_STATE": f"s3://{BUCKET}/state/adapters.json",
            "OPTION_ADAPTERS_STATE_REFRESH_SECONDS": "1",
        }

        def start(at: int) -> ServerProcess:
            words = ("--demo", "--engine", "scripted", "--port", str(at))
            return server_process(*words, environ=environ)

        servers = {at: start(at) for at in ports[:3]}
        for server in servers.values():
            server.url_when_ready()
        until(lambda: call(url, "/ready").status == 200)
        load = Load(url)
        with load.running():
            load.wait_for(100)
            servers[ports[0]].kill()
            load.wait_for(50)
            assert call(url, f"/adapters?name=called&src={CAPITALS}", method="POST").status == 200
            servers[ports[3]] = start(ports[3])
            servers[ports[3]].url_when_ready()
            for at in (ports[0], ports[1], ports[2]):
                _roll(servers, at, start)
                load.wait_for(30)
        lacking = [at for at in servers
                   if call(f"http://127.0.0.1:{at}", "/adapters/called").status != 200]  # fmt: skip
        assert (load.lost, load.crossed, lacking) == ([], [], [])
        if request.config.getoption("capture") == "no":
            report(load, store)


def _roll(servers: dict[int, ServerProcess], at: int, start: StartServer) -> None:
    """End a server as a rolling update does, and start it anew on its port."""
    if servers[at].process.poll() is None:
        servers[at].process.send_signal(signal.SIGTERM)
        assert servers[at].wait_exit() == 0
    servers[at] = start(at)
    servers[at].url_when_ready()
