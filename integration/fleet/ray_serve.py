"""Ray Serve on a cluster of this machine: our application deployed as its command line does it."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil

from integration.client import call, wait_until
from integration.conftest import clean_environment
from integration.environments import environment
from integration.fleet.proxies import free_ports

ROOT: Final = Path(__file__).parents[2]
MARK: Final = "LMI_RAY_FOLDER"  # in the environment of every process of a cluster
# Slow to import for each process of Ray, and optional for who imports it: four seconds of lark.
SLOW_MODULE: Final = "rfc3987_syntax.py"
STATUS: Final = (
    "import ray, sys; from ray import serve; ray.init(sys.argv[1], log_to_driver=False); "
    "print(serve.status())"
)
# As docs/scale-out.md says it.
MIDDLEWARES: Final = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "lmi_vllm.ray:middlewares"}


def commands() -> Path:
    """Return the folder of Ray's commands, in an environment where the server runs, too."""
    folder = environment(ROOT / ".venv-ray", ROOT / "integration" / "ray.txt").parent
    (site,) = folder.parent.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"{Path(psutil.__file__).parents[1]}\n")
    (site / SLOW_MODULE).write_text("raise ImportError\n")
    return folder


@dataclass(frozen=True)
class Replica:
    """The server of a replica: a child process on a Unix socket."""

    process: psutil.Process
    socket: str

    def get(self, path: str) -> str:
        """Return the body of the server's own answer."""
        connection = http.client.HTTPConnection("server", timeout=30)
        with contextlib.closing(connection), socket.socket(socket.AF_UNIX) as server:
            server.connect(self.socket)
            connection.sock = server
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def metric(self, series: str) -> int:
        """Return the sum of the series whose beginning has this pattern."""
        found = re.findall(rf"^{series}.* (\S+)$", self.get("/metrics"), re.MULTILINE)
        return int(sum(map(float, found)))


@dataclass
class RayCluster:
    """A running cluster; `url` is where its proxy answers."""

    folder: str
    environ: dict[str, str]
    process: "subprocess.Popen[str]"
    address: str
    port: int
    url: str = field(init=False)
    arguments: Mapping[str, Any] | None = None  # of the last deployment

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(self, arguments: Mapping[str, Any], replicas: int, **options: Any) -> None:
        """Deploy with options of the deployment; returns when so many replicas answer.

        With other arguments these are new ones: those of before answer until they are ready.
        """
        is_other = arguments != self.arguments
        before = {one.process.pid for one in self.replicas()} if is_other else set()
        self.submit(arguments, **options)

        def is_done() -> bool:
            kept = before & {one.process.pid for one in self.replicas()}
            return not kept and self.answering() == replicas

        assert wait_until(is_done, 300), (before, self.answering())

    def submit(self, arguments: Mapping[str, Any], **options: Any) -> None:
        """Deploy with options of the deployment, and wait for nothing."""
        self.arguments = arguments
        options = {"graceful_shutdown_timeout_s": 40, **options, "name": "lmi"}
        document = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "lmi", "route_prefix": "/", "import_path": "lmi_vllm.ray:app",
                    "args": {"gpus": 0, **arguments}, "deployments": [options],
                }
            ],
        }  # fmt: skip
        path = Path(self.folder) / "serve.yaml"
        path.write_text(json.dumps(document))  # JSON is YAML
        command = [commands() / "serve", "run", "--non-blocking", "--address", self.address, path]
        done = subprocess.run(
            command, env=self.environ, cwd=self.folder, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def status(self) -> str:
        """Return what Ray says of the applications."""
        command = [commands() / "python", "-c", STATUS, self.address]
        return subprocess.run(
            command, env=self.environ, cwd=self.folder, capture_output=True, text=True,
            timeout=60, check=True,
        ).stdout  # fmt: skip

    def answering(self) -> int:
        """Return the number of servers, if all of them get requests of the proxy."""
        servers = self.replicas()
        with contextlib.suppress(OSError, http.client.HTTPException):
            for _ in range(4):
                call(self.url, "/ping")  # which the relay never asks for
            if all(server.metric('lmi_requests_total{.*route="/ping"') for server in servers):
                return len(servers)
        return -1

    def replicas(self) -> list[Replica]:
        """Return the servers that there are now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_ours = process.environ().get(MARK) == self.folder
                if is_ours and any("ray_serve.child" in word for word in words):
                    found.append(Replica(process, words[-1]))
        return found

    def tell(self, line: str) -> None:
        """Have the cluster add or remove a node; returns when it has."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == line.split(maxsplit=1)[0]


def own_haproxy(folder: str) -> dict[str, str]:
    """Variables that give a cluster's HAProxy places of its own; Ray's are one for the machine."""
    prefix, place = "RAY_SERVE_HAPROXY_", f"{folder}/h"  # a socket's path has 107 bytes at most
    metrics, http, grpc = map(str, free_ports(3))
    return {
        f"{prefix}CONFIG_FILE_LOC": f"{place}/haproxy.cfg", f"{prefix}SOCKET_PATH": f"{place}/a",
        f"{prefix}METRICS_SOCKET_PATH": f"{place}/m", f"{prefix}SERVER_STATE_BASE": place,
        f"{prefix}SERVER_STATE_FILE": f"{place}/state", f"{prefix}METRICS_PORT": metrics,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": http, "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": grpc,
    }  # fmt: skip


@contextlib.contextmanager
def ray_cluster(nodes: int, **variables: str) -> Iterator[RayCluster]:
    """A cluster of a head without CPUs and so many nodes with one; variables are of every node."""
    python = commands() / "python"
    with TemporaryDirectory(prefix="lmi-ray-", dir="/tmp") as folder:  # Ray's sockets: short paths
        environ = {
            **clean_environment(), **MIDDLEWARES, MARK: folder, "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder,
            "RAY_raylet_start_wait_time_s": "120",  # 30 are too few on a busy machine
            "RAY_worker_niceness": "0",  # 15 has no turn beside other tests
            **own_haproxy(folder), **variables,
        }  # fmt: skip
        for name in ("RAY_ADDRESS", "PYTHONDONTWRITEBYTECODE"):
            environ.pop(name, None)
        (Path(folder) / "ray").mkdir()
        log = Path(folder) / "cluster.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [python, "-m", "integration.fleet.ray_cluster", str(nodes)],
                env=environ, cwd=ROOT, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, log.read_text()[-3000:]
            yield RayCluster(folder, environ, process, address, free_ports(1)[0])
        finally:
            end(folder, process)


def end(folder: str, process: "subprocess.Popen[str]") -> None:
    """Kill every process of a cluster."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get(MARK) == folder:
                one.kill()
