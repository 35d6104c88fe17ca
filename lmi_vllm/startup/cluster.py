"""Several nodes that serve one model: how many, which one this is, who leads (startup.md 9).

LMI's variables first, then those of a Kubernetes LeaderWorkerSet. Every node runs the same command
with the same options; only rank 0 answers HTTP.
"""

import socket
import time
from collections.abc import Mapping
from typing import Final

from lmi_vllm.errors import ConfigurationError
from lmi_vllm.messages import EngineArguments
from lmi_vllm.startup.argument_draft import ArgumentDraft
from lmi_vllm.startup.resolved import DEFAULT_ORIGIN, Settings

MASTER_PORT: Final = 29500  # torch's
_SIZES: Final = ("DJL_CLUSTER_SIZE", "LWS_GROUP_SIZE")
_RANKS: Final = ("DJL_NODE_RANK", "LWS_WORKER_INDEX")
_LEADERS: Final = ("DJL_LEADER_ADDR", "LWS_LEADER_ADDRESS", "MASTER_ADDR")
_KUBERNETES: Final = ".svc.cluster.local"
_LOOK_UP_SECONDS: Final = 60.0  # upstream's patience: a pod's name appears after the pod
_LOOK_UP_PAUSE: Final = 2.0


def put_cluster(draft: ArgumentDraft) -> int:
    """Put the arguments that several nodes need; returns how many there are."""
    settings = draft.settings
    size, size_name = _first(settings, _SIZES)
    if not isinstance(size, int) or size <= 1:
        return 1
    rank, rank_name = _first(settings, _RANKS)
    number = rank if isinstance(rank, int) else 0
    leader, leader_name = _first(settings, _LEADERS)
    if number >= size:
        draft.fail(f"{rank_name}={number}: the {size} nodes of {size_name} are 0 to {size - 1}")
    if not leader:
        draft.fail(
            f"{size_name}={size} needs the leader's address, as every node reaches it: set "
            f"DJL_LEADER_ADDR (or MASTER_ADDR)"
        )
    for option, reason in (
        ("enable_lora", "adapters are kept on the leader's disk only"),
        ("data_parallel_size", "copies of a model stay on one node each"),
    ):
        value = settings.option_value(option)
        if value is True or (option == "data_parallel_size" and value not in (None, 1)):
            draft.fail(f"{option}={value} is not possible with {size_name}={size}: {reason}")
    draft.put("nnodes", size, size_name)
    draft.put_if_unset("node_rank", number, rank_name or DEFAULT_ORIGIN)
    draft.put_if_unset("master_addr", _full_name(settings, str(leader or "")), leader_name)
    draft.put_if_unset("master_port", MASTER_PORT, DEFAULT_ORIGIN)
    draft.put_if_unset("distributed_executor_backend", "mp", DEFAULT_ORIGIN)
    return size


def check_cluster_span(draft: ArgumentDraft, span: int, nodes: int) -> None:
    """Refuse a model that cannot be cut into equal parts, one for each node."""
    if span % nodes:
        draft.fail(
            f"tensor_parallel_size x pipeline_parallel_size is {span}, which {nodes} nodes "
            f"cannot share equally"
        )


def follows(settings: Settings) -> bool:
    """Whether this node only works for a leader."""
    size, rank = _first(settings, _SIZES)[0], _first(settings, _RANKS)[0]
    return isinstance(size, int) and isinstance(rank, int) and size > 1 and rank > 0


def node_rank(arguments: Mapping[str, object]) -> int:
    """Which node of its cluster the engine arguments are for; 0 leads, also alone."""
    if int(str(arguments.get("nnodes") or 1)) <= 1:
        return 0
    return int(str(arguments.get("node_rank") or 0))


def cluster_exports(arguments: EngineArguments, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which vLLM and gloo find this node's own address; set ones win.

    Blocks while the leader's name is looked up, a minute at most.

    Raises:
        ConfigurationError: nobody knows the leader's name.
    """
    values = arguments.values
    if int(str(values.get("nnodes") or 1)) <= 1:
        return {}
    own = environ.get("VLLM_HOST_IP") or own_address(
        str(values["master_addr"]), int(str(values["master_port"]))
    )
    exports = {"VLLM_HOST_IP": own}
    if interface := interface_of(own):
        exports |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {name: value for name, value in exports.items() if not environ.get(name)}


def own_address(leader: str, port: int, seconds: float = _LOOK_UP_SECONDS) -> str:
    """This machine's address on the way to `leader`; no packet is sent.

    Raises:
        ConfigurationError: the name stayed unknown, or there is no way to it.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = socket.getaddrinfo(leader, port, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    [f"the leader {leader} cannot be found: {error.strerror or error}"]
                ) from error
            time.sleep(_LOOK_UP_PAUSE)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`."""
    import psutil  # noqa: PLC0415 (vLLM brings it, and `explain` has to work without)

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


def _first(settings: Settings, names: tuple[str, ...]) -> tuple[object, str]:
    """The first setting that has a value, and its name."""
    for name in names:
        value = settings.server_value(name)
        if value not in (None, ""):
            return value, name
    return None, names[0]


def _full_name(settings: Settings, leader: str) -> str:
    """The leader's name as LMI completes it inside a LeaderWorkerSet."""
    if not settings.server_value("LWS_LEADER_ADDR") or leader.endswith(_KUBERNETES):
        return leader
    return leader + _KUBERNETES
