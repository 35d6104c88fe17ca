"""Several nodes: LMI's variables and LeaderWorkerSet's, the arguments, and what is refused."""

import socket
from typing import Any

import pytest

from lmi_vllm.errors import ConfigurationError
from lmi_vllm.messages import EngineArguments
from lmi_vllm.startup.cluster import cluster_exports, follows, interface_of, own_address
from lmi_vllm.startup.devices import Devices
from lmi_vllm.startup.engine_args import translate
from lmi_vllm.startup.settings import load_settings

DJL = {"DJL_CLUSTER_SIZE": "2", "DJL_LEADER_ADDR": "head"}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "lmi-0.lmi.default"}


def arguments(environ: dict[str, str], gpus: int = 2) -> dict[str, Any]:
    """The arguments of several nodes, no error allowed."""
    result = translate(load_settings(environ), None, Devices(gpus))
    assert not result.errors, result.errors
    names = ("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend")
    return {name: result.arguments.values.get(name) for name in names}


@pytest.mark.parametrize(
    ("environ", "rank", "leader"),
    [
        pytest.param(DJL, 0, "head", id="leader"),
        pytest.param(DJL | {"DJL_NODE_RANK": "1"}, 1, "head", id="follower"),
        pytest.param(LWS, 0, "lmi-0.lmi.default", id="LeaderWorkerSet, leader"),
        pytest.param(LWS | {"LWS_WORKER_INDEX": "1"}, 1, "lmi-0.lmi.default", id="and worker"),
        pytest.param(DJL | LWS | {"LWS_WORKER_INDEX": "1"}, 1, "head", id="LMI's names win"),
        pytest.param(
            DJL | {"LWS_LEADER_ADDR": "x"}, 0, "head.svc.cluster.local", id="completed name"
        ),
        pytest.param(
            {"DJL_CLUSTER_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, 0, "10.0.0.1", id="torch's name"
        ),
    ],
)
def test_variables_become_vllm_s_arguments(environ: dict[str, str], rank: int, leader: str) -> None:
    """VLLM's own multi-node over its `mp` executor; rank above 0 follows."""
    assert arguments(environ) == {
        "nnodes": 2,
        "node_rank": rank,
        "master_addr": leader,
        "master_port": 29500,
        "distributed_executor_backend": "mp",
    }
    assert follows(load_settings(environ)) is (rank > 0)


def test_one_node_is_no_cluster() -> None:
    """A LeaderWorkerSet of one, and a rank that means nothing by itself."""
    for environ in ({"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "1"}, {"DJL_NODE_RANK": "1"}):
        assert set(arguments(environ).values()) == {None}
        assert not follows(load_settings(environ))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"DJL_CLUSTER_SIZE": "2"}, "DJL_LEADER_ADDR"),
        (DJL | {"DJL_NODE_RANK": "2"}, "DJL_NODE_RANK=2"),
        (DJL | {"OPTION_ENABLE_LORA": "true"}, "enable_lora"),
        (DJL | {"OPTION_DATA_PARALLEL_SIZE": "2"}, "data_parallel_size"),
        (DJL | {"OPTION_TENSOR_PARALLEL_DEGREE": "3"}, "cannot share equally"),
    ],
)
def test_what_nodes_cannot_do_is_an_error(environ: dict[str, str], words: str) -> None:
    """Each names the setting."""
    result = translate(load_settings(environ), None, Devices(4))
    assert any(words in error for error in result.errors), result.errors


def test_own_address_and_interface_are_exported_unless_set() -> None:
    """What the way to the leader says; nothing without a cluster."""
    values = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": 29500}
    given = EngineArguments(values, {})
    name = interface_of("127.0.0.1")
    expected = {"VLLM_HOST_IP": "127.0.0.1"}
    expected |= {key: str(name) for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    assert cluster_exports(given, {}) == expected
    own = cluster_exports(given, {"GLOO_SOCKET_IFNAME": "eth9", "VLLM_HOST_IP": "127.0.0.1"})
    assert own == {"NCCL_SOCKET_IFNAME": str(name)}
    assert cluster_exports(EngineArguments({"nnodes": 1}, {}), {}) == {}


def test_unknown_leader_is_an_error_that_names_it() -> None:
    """After the patience is over."""
    with pytest.raises(ConfigurationError, match=r"the leader nobody\.invalid cannot be found"):
        own_address("nobody.invalid", 1, seconds=0)
    assert own_address("127.0.0.1", 1) == socket.gethostbyname("127.0.0.1")
