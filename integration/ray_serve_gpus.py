"""GPUs of Ray Serve's replicas, on nodes that say they have some: who gets which, and who waits.

Ray counts the GPUs that a node was started with, so the machine needs none. The scripted engine
answers; what counts is which GPUs each server is told to use.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator

import psutil
import pytest

from integration.client import wait_until
from integration.fleet.ray_serve import RayCluster, ray_cluster
from integration.ray_serve import SCRIPTED

pytestmark = pytest.mark.random_order(disabled=True)  # nodes are added from test to test


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A node with two CPUs and a GPU."""
    with ray_cluster(
        0, RAY_SERVE_SLOW_STARTUP_WARNING_S="3", RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S="3"
    ) as running:
        running.tell("add 2 1")
        yield running


def gpus(cluster: RayCluster) -> list[list[str]]:
    """Return the GPUs that each server may use."""
    told = []
    for one in cluster.replicas():
        with contextlib.suppress(psutil.NoSuchProcess):
            told.append(one.process.environ()["CUDA_VISIBLE_DEVICES"])
    return sorted([gpu for gpu in one.split(",") if gpu] for one in told)


def test_two_halves_share_the_only_gpu(cluster: RayCluster) -> None:
    """Both are told the same one."""
    cluster.deploy({"command": SCRIPTED, "gpus": 0.5}, 2, num_replicas=2)
    assert gpus(cluster) == [["0"], ["0"]]


def test_two_gpus_of_two_nodes_are_not_a_pair(cluster: RayCluster) -> None:
    """The replica waits, and the status says for what."""
    cluster.tell("add 1 1")
    cluster.submit({"command": SCRIPTED, "gpus": 2}, num_replicas=1)
    assert wait_until(lambda: bool(re.search(r"GPU\W+2", cluster.status())), 60), cluster.status()
    assert all(len(told) == 1 for told in gpus(cluster))  # what is left of the two halves


def test_two_replicas_of_two_gpus_share_none(cluster: RayCluster) -> None:
    """Each has a pair of the node that has four."""
    cluster.tell("add 2 4")
    cluster.deploy({"command": SCRIPTED, "gpus": 2}, 2, num_replicas=2)
    assert wait_until(lambda: [len(told) for told in gpus(cluster)] == [2, 2], 60), gpus(cluster)
    assert sorted(itertools.chain(*gpus(cluster))) == ["0", "1", "2", "3"]


def test_replicas_without_gpus_see_none(cluster: RayCluster) -> None:
    """Ray hides none of a node's from them, and a server would take all."""
    cluster.deploy({"command": SCRIPTED, "gpus": 0}, 2, num_replicas=2)
    assert wait_until(lambda: gpus(cluster) == [[], []], 60), gpus(cluster)
