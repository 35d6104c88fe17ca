"""One model on two machines: two network namespaces joined by a cable, a tensor rank in each.

Only the leader answers HTTP. A third cable leads from here to the leader.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.client import call, wait_until
from integration.conftest import RunningServer, ServerProcess, start_server
from integration.plain_model import plain_model
from integration.server_death_leaves_nothing import are_gone, survivors

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="needs root and the ip command to make network namespaces",
    ),
]
GONE_SECONDS = 30.0
LEADER, FOLLOWER = "10.203.7.1", "10.203.7.2"
OUTSIDE, INSIDE = "10.203.8.1", "10.203.8.2"
PROMPTS = ("The capital of France is", "Once upon a time")


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


@dataclass(frozen=True)
class Cluster:
    """Both nodes, ready."""

    leader: ServerProcess
    follower: ServerProcess
    url: str


@pytest.fixture
def cluster(namespaces: tuple[str, str], tmp_path: Path) -> Iterator[Cluster]:
    """The embedded model, half of each layer on each node; the follower is started first."""
    common = {
        "DJL_CLUSTER_SIZE": "2",
        "DJL_LEADER_ADDR": LEADER,
        "HF_MODEL_ID": str(plain_model(tmp_path / "model", tensor_parallel_degree="2")),
    }
    started: list[ServerProcess] = []

    def start(name: str, rank: dict[str, str]) -> ServerProcess:
        launcher = ("ip", "netns", "exec", name, sys.executable)
        server = start_server(
            tmp_path, "--host", INSIDE if not rank else "127.0.0.1", "--port", "0",
            environ=common | rank, launcher=launcher,
        )  # fmt: skip
        started.append(server)
        return server

    try:
        follower = start(namespaces[1], {"LWS_WORKER_INDEX": "1"})
        leader = start(namespaces[0], {})
        url = leader.wait_listening()
        leader.wait_ready()
        follower.wait_for_line(f"Following {LEADER} as node 1 of 2", 30)
        yield Cluster(leader, follower, url)
    finally:
        for server in started:
            server.kill()


def tokens(url: str, prompt: str) -> list[int]:
    """Return the greedy tokens after `prompt`."""
    payload = {"inputs": prompt, "parameters": {"max_new_tokens": 6, "details": True}}
    answer = call(url, "/invocations", payload)
    assert answer.status == 200, answer.body
    return [token["id"] for token in json.loads(answer.body)["details"]["tokens"]]


def test_two_nodes_answer_as_one_and_end_together(
    cluster: Cluster, demo_server: RunningServer
) -> None:
    """Same tokens; SIGTERM to the leader drains it, and the follower ends with it."""
    for prompt in PROMPTS:
        assert tokens(cluster.url, prompt) == tokens(demo_server.url, prompt)
    everything = [*cluster.leader.children(), *cluster.follower.children()]
    assert len(cluster.follower.children()) >= 1
    os.kill(cluster.leader.process.pid, signal.SIGTERM)
    assert cluster.leader.wait_exit() == 0, cluster.leader.describe()
    assert cluster.follower.wait_exit() == 0, cluster.follower.describe()
    wait_until(lambda: are_gone(everything), GONE_SECONDS)


def test_dead_worker_of_the_follower_ends_both(cluster: Cluster) -> None:
    """Health fails at once, the leader says why and exits 1; nothing is left on either node."""
    everything = [*cluster.leader.children(), *cluster.follower.children()]
    for worker in cluster.follower.children():
        worker.kill()
    assert cluster.leader.wait_exit() == 1, cluster.leader.describe()
    assert "lmi-vllm: error:" in cluster.leader.stderr
    cluster.follower.wait_exit()
    wait_until(lambda: are_gone(everything), GONE_SECONDS)
    assert survivors(everything) == []
