"""One model on two machines: two network namespaces joined by a cable, a tensor rank in each.

Only the leader answers HTTP. A third cable leads from here to the leader.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration.client import OpenStream, call, running_requests, wait_until
from integration.conftest import RunningServer, ServerProcess, start_server
from integration.forked_server import enter_network
from integration.plain_model import plain_model
from integration.server_exit_cleans_up import are_gone, survivors
from lmi_vllm.features.nodes.follow import WORKER_ENDED

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="needs root and the ip command to make network namespaces",
    ),
]
DISCONNECT_SECONDS = 30.0
LEADER, FOLLOWER = "10.203.7.1", "10.203.7.2"
OUTSIDE, INSIDE = "10.203.8.1", "10.203.8.2"
PROMPTS = ("The capital of France is", "Once upon a time")
FOLLOWING = f"Following {LEADER} as node 1 of 2"
HEALTHY = '{"model":{"status":"Healthy"}}\n'
RESTART_SECONDS = 90.0
SILENCE_SECONDS = 120.0
TENSOR = {"OPTION_TENSOR_PARALLEL_DEGREE": "2"}
PIPELINE = {"OPTION_PIPELINE_PARALLEL_DEGREE": "2"}
LONG: dict[str, Any] = {
    "inputs": "Once upon a time",
    "parameters": {"max_new_tokens": 1800, "ignore_eos_token": True},
}


def ip(command: str) -> None:
    """Run one `ip` command."""
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {command}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two machines, named; skips where the kernel does not let us make them."""
    one, two = f"lmi-{os.getpid()}-a", f"lmi-{os.getpid()}-b"
    cables = (
        f"link add lmi-a type veth peer name lmi-b netns {two}",
        f"link set lmi-a netns {one}",
        f"-n {one} addr add {LEADER}/24 dev lmi-a",
        f"-n {two} addr add {FOLLOWER}/24 dev lmi-b",
        f"link add lmi-out type veth peer name lmi-in netns {one}",
        f"addr add {OUTSIDE}/24 dev lmi-out",
        f"-n {one} addr add {INSIDE}/24 dev lmi-in",
        "link set lmi-out up",
        *(f"-n {one} link set {name} up" for name in ("lo", "lmi-a", "lmi-in")),
        *(f"-n {two} link set {name} up" for name in ("lo", "lmi-b")),
    )
    try:
        try:
            ip(f"netns add {one}")
            ip(f"netns add {two}")
            for command in cables:
                ip(command)
        except OSError as error:
            pytest.skip(str(error))
        yield one, two
    finally:
        for name in (one, two):
            with contextlib.suppress(OSError):
                ip(f"netns del {name}")
        with contextlib.suppress(OSError):
            ip("link del lmi-out")


@dataclass
class Cluster:
    """Both machines and what is started on them; the model's halves lie one on each."""

    names: tuple[str, str]
    folder: Path
    environ: dict[str, str]
    started: list[ServerProcess] = field(default_factory=list)

    def lead(self, **environ: str) -> ServerProcess:
        """Start the node that answers."""
        return self._start(0, INSIDE, environ)

    def follow(self, **environ: str) -> ServerProcess:
        """Start the node behind it."""
        return self._start(1, "127.0.0.1", {"LWS_WORKER_INDEX": "1"} | environ)

    def both(self, **environ: str) -> tuple[ServerProcess, ServerProcess, str]:
        """Leader, follower and the leader's URL, ready; the follower is started first."""
        follower = self.follow(**environ)
        leader = self.lead(**environ)
        url = leader.url_when_ready()
        follower.wait_for_line(FOLLOWING, 30)
        return leader, follower, url

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Pull the cable between the two for the body."""
        ip(f"-n {self.names[1]} link set lmi-b down")
        try:
            yield
        finally:
            ip(f"-n {self.names[1]} link set lmi-b up")

    def _start(self, node: int, host: str, environ: dict[str, str]) -> ServerProcess:
        def start() -> ServerProcess:
            enter_network(os.open(f"/run/netns/{self.names[node]}", os.O_RDONLY))
            words = ("--host", host, "--port", "0")
            return start_server(self.folder, *words, environ=self.environ | environ, is_forked=True)

        with ThreadPoolExecutor(1) as thread:  # the network is that of the thread that starts it
            self.started.append(thread.submit(start).result())
        return self.started[-1]


@pytest.fixture
def cluster(namespaces: tuple[str, str], tmp_path: Path) -> Iterator[Cluster]:
    """The embedded model on two nodes, one tensor rank each unless a test says otherwise."""
    environ = {
        "DJL_CLUSTER_SIZE": "2",
        "DJL_LEADER_ADDR": LEADER,
        "HF_MODEL_ID": str(plain_model(tmp_path / "model")),
    }
    nodes = Cluster(namespaces, tmp_path, environ)
    yield nodes
    for server in nodes.started:
        server.kill()


def tokens(url: str, prompt: str) -> list[int]:
    """Return the greedy tokens after `prompt`."""
    payload = {"inputs": prompt, "parameters": {"max_new_tokens": 6, "details": True}}
    answer = call(url, "/invocations", payload)
    assert answer.status == 200, answer.body
    return [token["id"] for token in json.loads(answer.body)["details"]["tokens"]]


def health(url: str) -> tuple[int, str]:
    """Return the status of /ping and its body; 0 when the port is closed."""
    try:
        answer = call(url, "/ping", seconds=10)
    except OSError:
        return 0, ""
    return answer.status, answer.body.decode()


def everything(*servers: ServerProcess) -> list[psutil.Process]:
    """Return what the servers have started."""
    return [child for server in servers for child in server.children()]


def kill_workers(follower: ServerProcess) -> None:
    """As the kernel does when memory is short."""
    for worker in follower.children():
        worker.kill()


def kill_node(follower: ServerProcess) -> None:
    """As a machine that loses its power, apart from the word its kernel still sends."""
    follower.kill()


def terminate(server: ServerProcess) -> None:
    """As an orchestrator that drains a node."""
    server.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("sizes", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_two_nodes_answer_as_one_and_end_together(
    cluster: Cluster, demo_server: RunningServer, sizes: dict[str, str]
) -> None:
    """Same tokens; SIGTERM to the leader drains it, and the follower ends with it."""
    leader, follower, url = cluster.both(**sizes)
    assert health(url) == (200, HEALTHY)
    for prompt in PROMPTS:
        assert tokens(url, prompt) == tokens(demo_server.url, prompt)
    processes = everything(leader, follower)
    assert len(follower.children()) >= 1
    terminate(leader)
    assert leader.wait_exit() == 0, leader.describe()
    assert follower.wait_exit() == 0, follower.describe()
    assert wait_until(lambda: are_gone(processes), DISCONNECT_SECONDS), survivors(processes)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(kill_workers, None, id="its workers"),
        pytest.param(kill_node, -9, id="the node"),
        pytest.param(terminate, 0, id="SIGTERM"),
    ],
)
def test_lost_follower_ends_the_leader(
    cluster: Cluster, end: Callable[[ServerProcess], None], code: int | None
) -> None:
    """Requests get their error, health fails, the leader says why and exits 1; nothing is left."""
    leader, follower, url = cluster.both(**TENSOR)
    processes = everything(leader, follower)
    with ThreadPoolExecutor(1) as client:
        stream = OpenStream(url, "/invocations", LONG | {"stream": True})
        whole = client.submit(call, url, "/invocations", LONG)
        assert wait_until(lambda: running_requests(url) == 2, 30)
        assert health(url) == (200, HEALTHY)
        end(follower)
        assert json.loads(stream.rest().splitlines()[-1])["code"] == 500
        answer = whole.result()
    assert (answer.status, json.loads(answer.body)["code"]) == (500, 500), answer.body
    assert wait_until(lambda: health(url)[0] in (0, 503), 10)
    assert leader.wait_exit() == 1, leader.describe()
    last = [line for line in leader.stderr.splitlines() if line.startswith("lmi-vllm: error: ")]
    assert last, leader.describe()
    assert any(words in last[-1] for words in ("the engine process died", "a worker of the engine"))
    # On a busy machine the leader's engine may die of its peer before the node can say goodbye.
    is_named = end is kill_workers and WORKER_ENDED in follower.stderr
    is_named |= end is kill_node and f"[{FOLLOWER}]" in last[-1]  # by gloo's address
    assert is_named or f"node {FOLLOWER} has gone" in leader.stderr, leader.describe()
    assert code is None or follower.wait_exit() == code, follower.describe()
    follower.wait_exit()
    assert wait_until(lambda: are_gone(processes), DISCONNECT_SECONDS), survivors(processes)


def test_idle_leader_notices_that_its_follower_went(cluster: Cluster) -> None:
    """Without a request; with the override the process stays, and /ping says so."""
    leader, follower, url = cluster.both(**TENSOR, SERVING_HEALTH_CHECK_OVERRIDE="true")
    kill_node(follower)
    assert wait_until(lambda: "FAILED" in health(url)[1], DISCONNECT_SECONDS), leader.describe()
    assert health(url)[0] == 200
    assert call(url, "/invocations", {"inputs": "a"}).status == 503
    terminate(leader)
    assert leader.wait_exit() == 0, leader.describe()


def test_cable_that_is_pulled_ends_both(cluster: Cluster) -> None:
    """No word comes from the other side any more: the kernels' probes tell, after 25 s."""
    leader, follower, url = cluster.both(**TENSOR)
    processes = everything(leader, follower)
    stream = OpenStream(url, "/invocations", LONG | {"stream": True})
    with cluster.cut():
        assert json.loads(stream.rest().splitlines()[-1])["code"] == 500
        assert leader.wait_exit(SILENCE_SECONDS) == 1, leader.describe()
        assert follower.wait_exit(SILENCE_SECONDS) in (0, 1), follower.describe()
    assert wait_until(lambda: are_gone(processes), DISCONNECT_SECONDS), survivors(processes)


def test_leader_serves_again_when_its_follower_comes_back(cluster: Cluster) -> None:
    """SERVING_RETRY_THRESHOLD: /ping 503 until then, and the same tokens; for two reasons."""
    leader, follower, url = cluster.both(**TENSOR, SERVING_RETRY_THRESHOLD="2")
    before = tokens(url, PROMPTS[0])
    for who in ("follower", "leader's engine"):
        if who == "follower":
            kill_node(follower)
        else:
            kill_workers(leader)
            assert follower.wait_exit() == 0, follower.describe()
        assert wait_until(lambda: health(url)[0] == 503, DISCONNECT_SECONDS), who
        status, body = health(url)
        assert (status, "PENDING" in body, '"engine"' in body) == (503, True, True), (who, body)
        refused = call(url, "/invocations", {"inputs": "a"})
        assert (refused.status, "retry-after" in refused.headers) == (503, True), who
        follower = cluster.follow(**TENSOR)
        follower.wait_for_line(FOLLOWING)
        assert wait_until(lambda: health(url)[0] == 200, RESTART_SECONDS), leader.describe()
        assert tokens(url, PROMPTS[0]) == before, who
    terminate(leader)
    assert leader.wait_exit() == 0, leader.describe()
    assert follower.wait_exit() == 0, follower.describe()


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_node_that_waits_for_the_other_ends_on_sigterm(cluster: Cluster, role: str) -> None:
    """Without a leader: /ping says that the engine starts; SIGTERM is obeyed, exit code 0."""
    node = cluster.lead(**TENSOR) if role == "leader" else cluster.follow(**TENSOR)
    if role == "leader":
        url = node.wait_listening()
        assert wait_until(lambda: '"engine"' in health(url)[1], 60)
        assert health(url)[0] == 503
    assert wait_until(lambda: bool(node.children()), 150), node.describe()
    processes = everything(node)
    terminate(node)
    assert node.wait_exit() == 0, node.describe()
    assert wait_until(lambda: are_gone(processes), DISCONNECT_SECONDS), survivors(processes)


def test_leader_with_two_front_ends(cluster: Cluster) -> None:
    """LMI_FRONTEND_PROCESSES: every process answers over the engine of both nodes."""
    leader, follower, url = cluster.both(**TENSOR, LMI_FRONTEND_PROCESSES="2")
    said = [tokens(url, PROMPTS[0]) for _ in range(8)]
    assert said == said[:1] * 8
    kill_node(follower)
    assert leader.wait_exit() == 1, leader.describe()
