"""Several nodes: LMI's variables and LeaderWorkerSet's, the arguments, and what is refused."""

import contextlib
import socket
from typing import Any

import pytest

from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.nodes.cluster import (
    cluster_exports,
    follows,
    interface_of,
    node_rank,
    own_address,
)
from lmi_vllm.features.nodes.liveness import start_variables
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate

DJL = {"DJL_CLUSTER_SIZE": "2", "DJL_LEADER_ADDR": "head"}
VLLM = {"OPTION_NNODES": "2", "OPTION_NODE_RANK": "1", "OPTION_MASTER_ADDR": "fd00::7"}
OTHER = "127.9.9.9"  # also this machine's, but no address that its own packets bear
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
        pytest.param(
            LWS | {"LWS_LEADER_ADDR": "x", "LWS_LEADER_ADDRESS": "a.svc.cluster.local"},
            0,
            "a.svc.cluster.local",
            id="complete already",
        ),
        pytest.param(LWS | {"MASTER_ADDR": "m"}, 0, "lmi-0.lmi.default", id="torch's name is last"),
        pytest.param(VLLM, 1, "fd00::7", id="vLLM's own names"),
        pytest.param(DJL | VLLM | {"DJL_NODE_RANK": "0"}, 1, "fd00::7", id="vLLM's own names win"),
        pytest.param(
            DJL | {"DJL_CLUSTER_SIZE": "", "LWS_GROUP_SIZE": "2"}, 0, "head", id="empty is unset"
        ),
        pytest.param(DJL | {"DJL_NODE_RANK": "0", "LWS_WORKER_INDEX": "1"}, 0, "head", id="rank 0"),
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


def test_arguments_say_where_they_are_from() -> None:
    """Errors of vLLM's about them name the variable."""
    environ = LWS | {"LWS_WORKER_INDEX": "1"}
    result = translate(load_settings(environ), None, Devices(2))
    names = ("nnodes", "node_rank", "master_addr", "master_port")
    assert [str(result.arguments.origins[name]) for name in names] == [
        "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS", "default",
    ]  # fmt: skip


def test_one_node_is_no_cluster() -> None:
    """A LeaderWorkerSet of one, and a rank that means nothing by itself."""
    for environ in ({"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "1"}, {"DJL_NODE_RANK": "1"}):
        assert set(arguments(environ).values()) == {None}
        assert not follows(load_settings(environ))


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (
            {"DJL_CLUSTER_SIZE": "2"},
            "DJL_CLUSTER_SIZE=2 needs the leader's address, as every node reaches it: set "
            "DJL_LEADER_ADDR (or MASTER_ADDR)",
        ),
        (
            DJL | {"DJL_NODE_RANK": "2"},
            "DJL_NODE_RANK=2: the 2 nodes of DJL_CLUSTER_SIZE are 0 to 1",
        ),
        (
            LWS | {"LWS_WORKER_INDEX": "7"},
            "LWS_WORKER_INDEX=7: the 2 nodes of LWS_GROUP_SIZE are 0 to 1",
        ),
        (
            DJL | {"OPTION_NODE_RANK": "-1"},
            "option.node_rank=-1 (OPTION_NODE_RANK): the 2 nodes of DJL_CLUSTER_SIZE are 0 to 1",
        ),
        (
            DJL | {"OPTION_ENABLE_LORA": "true"},
            "enable_lora=True is not possible with DJL_CLUSTER_SIZE=2: adapters are kept on the "
            "leader's disk only",
        ),
        (
            DJL | {"OPTION_DATA_PARALLEL_SIZE": "2"},
            "data_parallel_size=2 is not possible with DJL_CLUSTER_SIZE=2: copies of a model stay "
            "on one node each",
        ),
        (
            DJL | {"OPTION_TENSOR_PARALLEL_DEGREE": "3"},
            "tensor_parallel_size x pipeline_parallel_size is 3, which 2 nodes cannot share "
            "equally",
        ),
        (
            DJL | {"OPTION_WORKER_USE_RAY": "true"},
            "distributed_executor_backend=ray (OPTION_WORKER_USE_RAY) is not possible with "
            "DJL_CLUSTER_SIZE=2: nodes of this kind need mp. Ray knows its nodes itself: with it, "
            "serve runs on one of them and no number of nodes is set",
        ),
        *(
            (
                DJL | {"OPTION_MASTER_PORT": port},
                f"master_port={port} (OPTION_MASTER_PORT): 1 to 65534 are possible (the port after "
                f"it is used too)",
            )
            for port in ("0", "65535")
        ),
        *(
            (
                DJL | {"DJL_LEADER_ADDR": leader},
                f"DJL_LEADER_ADDR={leader}: a host name or an IP address is needed, without a "
                f"scheme or a port (option.master_port is the port, 29500 unless it is set)",
            )
            for leader in ("http://head", "head:29500", "head/", "-head", "head.-", "two words")
        ),
    ],
)
def test_settings_excluded_with_nodes_are_errors(environ: dict[str, str], sentence: str) -> None:
    """Each names the setting; nothing else is complained of."""
    result = translate(
        load_settings({"OPTION_TENSOR_PARALLEL_DEGREE": "2"} | environ), None, Devices(4)
    )
    assert result.errors == (sentence,)


@pytest.mark.parametrize("name", ["DJL_CLUSTER_SIZE", "LWS_GROUP_SIZE"])
@pytest.mark.parametrize("text", ["0", "-2", "two", "1.5"])
def test_size_that_is_no_number_of_nodes_is_an_error(name: str, text: str) -> None:
    """Found when the settings are read, before a port is opened."""
    expected = f"{name}={text} cannot be used: a whole number of at least 1 is needed"
    assert load_settings({name: text}).errors == (expected,)


@pytest.mark.parametrize("name", ["DJL_NODE_RANK", "LWS_WORKER_INDEX"])
def test_rank_below_0_is_an_error(name: str) -> None:
    """The same for the node's number."""
    expected = f"{name}=-1 cannot be used: a whole number of at least 0 is needed"
    assert load_settings({name: "-1"}).errors == (expected,)


@pytest.mark.parametrize("leader", ["h", "10.0.0.7", "fd00::7", "fe80::1%eth0", "a_b.c-d.e."])
def test_leader_is_a_name_or_an_address(leader: str) -> None:
    """Of either family, with a zone, with a last dot."""
    assert arguments(DJL | {"DJL_LEADER_ADDR": leader})["master_addr"] == leader


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"DJL_NODE_RANK": "1"}, ["DJL_NODE_RANK=1"]),
        ({"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "1"}, ["LWS_WORKER_INDEX=1"]),
        ({"DJL_LEADER_ADDR": "head"}, ["DJL_LEADER_ADDR=head"]),
        ({"OPTION_NODE_RANK": "1"}, ["option.node_rank=1 (OPTION_NODE_RANK)"]),
        ({"DJL_NODE_RANK": "0", "MASTER_ADDR": "head", "LWS_LEADER_ADDRESS": "head"}, []),
    ],
)
def test_node_without_a_size_serves_alone_and_says_so(
    environ: dict[str, str], names: list[str]
) -> None:
    """The size was forgotten; what torch or a controller always sets is no reason."""
    assert [warning.partition(" has no")[0] for warning in warnings(environ)] == names
    assert all("serves the model alone" in warning for warning in warnings(environ))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            DJL | LWS,
            ["LWS_LEADER_ADDRESS=lmi-0.lmi.default has no effect: DJL_LEADER_ADDR=head counts"],
        ),
        (
            DJL | {"LWS_GROUP_SIZE": "3"},
            ["LWS_GROUP_SIZE=3 has no effect: DJL_CLUSTER_SIZE=2 counts"],
        ),
        (
            DJL | {"OPTION_NNODES": "2", "DJL_NODE_RANK": "1", "LWS_WORKER_INDEX": "0"},
            ["LWS_WORKER_INDEX=0 has no effect: DJL_NODE_RANK=1 counts"],
        ),
        (DJL | {"MASTER_ADDR": "127.0.0.1"}, []),
    ],
)
def test_settings_that_disagree_are_named(environ: dict[str, str], expected: list[str]) -> None:
    """Which one counts is said; torch's own variable, which much sets, is passed over."""
    assert warnings(environ) == expected


def warnings(environ: dict[str, str]) -> list[str]:
    """What is warned of."""
    return list(translate(load_settings(environ), None, Devices(2)).warnings)


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
    # An address of no interface here, as behind an address translation: gloo chooses itself.
    assert cluster_exports(given, {"VLLM_HOST_IP": "203.0.113.7"}) == {}


@pytest.mark.parametrize(
    ("values", "rank"),
    [
        ({}, 0),
        ({"nnodes": 1, "node_rank": 3}, 0),
        ({"nnodes": 2}, 0),
        ({"nnodes": 4, "node_rank": 3}, 3),
    ],
)
def test_rank_of_the_arguments(values: dict[str, object], rank: int) -> None:
    """A single node leads, whatever number it has."""
    assert node_rank(EngineArguments(values)) == rank


@pytest.mark.parametrize(
    ("leader", "rank", "is_wrong"), [(OTHER, 0, True), (OTHER, 1, False), ("127.0.0.1", 0, False)]
)
def test_leader_that_is_another_machine_is_warned_of(
    leader: str, rank: int, is_wrong: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes without a number would wait for each other; nothing is sent to find out."""
    values = {"nnodes": 2, "node_rank": rank, "master_addr": leader, "master_port": 29500}
    cluster_exports(EngineArguments(values, {}), {})
    said = f"the leader {leader} is {leader} and this machine "
    assert [said in record.getMessage() for record in caplog.records] == [True] * is_wrong


def test_unknown_leader_is_an_error_that_names_it() -> None:
    """After the time is over."""
    with pytest.raises(ConfigurationError, match=r"the leader missing\.invalid cannot be found"):
        own_address("missing.invalid", 1, seconds=0)
    assert own_address("127.0.0.1", 1) == socket.gethostbyname("127.0.0.1")


def test_explicit_max_counts_all_nodes_and_the_default_one() -> None:
    """An explicit `max` counts all nodes' GPUs; no copies are made."""
    for text, size in (("max", 8), ("", 4)):
        environ = {
            "DJL_CLUSTER_SIZE": "2",
            "DJL_LEADER_ADDR": "head",
            "OPTION_TENSOR_PARALLEL_DEGREE": text,
        }
        result = translate(load_settings(environ), None, Devices(4))
        assert result.arguments.values["tensor_parallel_size"] == size
        assert "data_parallel_size" not in result.arguments.values
        assert not result.errors


@pytest.mark.parametrize(("rank", "is_watching"), [(0, True), (1, False)])
def test_a_leader_watches_its_followers(rank: int, is_watching: bool) -> None:
    """At the port after `master_port`, before the engine starts; a port that is taken is named."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        values = {"nnodes": 2, "node_rank": rank, "master_addr": "127.0.0.1"}
        environ = {"VLLM_HOST_IP": "127.0.0.1"}

        def prepare() -> dict[str, str]:
            asked = EngineArguments({**values, "master_port": port - 1}, {})
            return start_variables(Settings(), ModelArtifacts("m", "m", "m"), asked, environ)

        if is_watching:
            with pytest.raises(ConfigurationError, match=f":{port}, where the leader listens"):
                prepare()
        taken.close()
        prepare()
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5).close()
            assert is_watching
            return
        assert not is_watching
