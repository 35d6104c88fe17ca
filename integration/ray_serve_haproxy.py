"""`lmi_vllm.ray:app` where HAProxy sends requests to Ray's replicas itself.

The variables are those of docs/scale-out.md, and HAProxy is that of Ray's own packages. The
scripted engine answers, on a cluster of two nodes.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psutil
import pytest

from integration.client import OpenStream, call, send, wait_until
from integration.conftest import RunningServer, running_server
from integration.fleet.ray_load import LMI, Load
from integration.fleet.ray_serve import MARK, RayCluster, commands, ray_cluster
from integration.ray_serve import (
    ABORT_SECONDS,
    FEWER_TOKENS,
    LONG,
    ONE_A_NODE,
    SCRIPTED,
    VARIABLES,
    ask,
    drop_and_see_the_abort,
    in_flight,
)
from tests.golden.cases import load_golden

pytestmark = pytest.mark.random_order(disabled=True)  # one cluster, whose replicas come and go
DRAIN_SECONDS: Final = "3"  # 30 by default, in which the replica is there and gets nothing
# On a busy machine five streams of a thousand rows a second outlasted the 120 s of the deployment.
SLOWLY: Final = {**VARIABLES, "LMI_SCRIPTED_SECONDS_PER_TOKEN": "0.005"}
TOKENS_OF_A_DRAIN: Final = 12_000  # 60 s at least, in which Ray's command begins
GRACE: Final = {"graceful_shutdown_timeout_s": 120}  # as our deployment has it
LONG_BODY: Final = {"inputs": "The sea is wide. " * 200_000, "parameters": {"max_new_tokens": 4}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A replica on each of two nodes."""
    with ray_cluster(
        2,
        RAY_SERVE_ENABLE_HA_PROXY="1",
        RAY_SERVE_THROUGHPUT_OPTIMIZED="1",
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=DRAIN_SECONDS,
    ) as running:
        running.deploy({"command": SCRIPTED, **SLOWLY}, 2, **ONE_A_NODE, **GRACE)
        yield running


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The same server without Ray."""
    folder = tmp_path_factory.mktemp("lone")
    with running_server(folder, *SCRIPTED.split(), environ=SLOWLY) as server:
        yield server


def haproxies(cluster: RayCluster) -> list[Path]:
    """Return the programs of the cluster that are HAProxy."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "haproxy" in process.name() and process.environ().get(MARK) == cluster.folder:
                found.append(Path(process.exe()))
    return found


def test_golden_requests_get_the_bytes_of_a_lone_server(
    cluster: RayCluster, lone: RunningServer
) -> None:
    """By HAProxy, which came with Ray: every dialect, whole and streamed, and every error."""
    programs = haproxies(cluster)
    assert any(commands().resolve().parent in program.parents for program in programs), programs
    for case in load_golden():
        through, direct = ask(cluster.url, case), ask(lone.url, case)
        assert (through.status, through.body) == (direct.status, direct.body), case.name
        assert through.headers.get("content-type") == direct.headers.get("content-type"), case.name


def test_a_stream_and_a_long_body_are_whole(cluster: RayCluster, lone: RunningServer) -> None:
    """Every row in order; a prompt of 3 MB is answered, or refused, as without Ray."""
    parameters = {"max_new_tokens": FEWER_TOKENS}
    for body in ({**LONG, "parameters": parameters, "stream": True}, LONG_BODY):
        found = [call(url, "/invocations", body) for url in (cluster.url, lone.url)]
        assert (found[0].status, found[0].body) == (found[1].status, found[1].body)


def test_a_client_that_disconnects_aborts(cluster: RayCluster) -> None:
    """The server holds nothing for a stream any more."""
    drop_and_see_the_abort(cluster, is_streamed=True)


def test_a_whole_request_ends_where_haproxy_passes_the_end_on(cluster: RayCluster) -> None:
    """It does not every time (docs/performance/ray-serve.md), so that one of ten has to.

    Each answers 10 s after its begin, and an abort is seen within 5.
    """
    body = {**LONG, "parameters": {"max_new_tokens": 2_000}}
    for _ in range(10):
        connection = send(cluster.url, "/invocations", body)
        assert wait_until(lambda: in_flight(cluster) == 1, 10)
        connection.close()
        if wait_until(lambda: in_flight(cluster) == 0, ABORT_SECONDS):
            return
        assert wait_until(lambda: in_flight(cluster) == 0, 60)  # it is answered
    pytest.fail("no end of a client has come through")


def test_a_replica_that_drains_loses_nothing(cluster: RayCluster, lone: RunningServer) -> None:
    """Each request is answered at its first try, and the streams of both go on to their end."""
    body = {**LONG, "parameters": {"max_new_tokens": TOKENS_OF_A_DRAIN}, "stream": True}
    expected = call(lone.url, "/invocations", LMI).body
    urls = [lone.url, *[cluster.url] * 4]
    with ThreadPoolExecutor(len(urls)) as pool, Load(cluster.url, expected) as load:
        streams = [OpenStream(url, "/invocations", body) for url in urls]
        assert all(one.metric("lmi_requests_in_flight") for one in cluster.replicas())
        answers = [pool.submit(stream.rest) for stream in streams]
        cluster.submit({"command": SCRIPTED, **SLOWLY}, num_replicas=1, **GRACE)
        assert not any(answer.done() for answer in answers)
        assert wait_until(lambda: len(cluster.replicas()) == 1, 120)
        direct, *through = [answer.result() for answer in answers]
        known = load.answered.total()
        assert wait_until(lambda: load.answered.total() > known + 20, 30)
    assert direct.count(b"\n") == TOKENS_OF_A_DRAIN
    assert [answer.count(b"\n") for answer in through] == [TOKENS_OF_A_DRAIN] * 4
    assert set(through) == {direct}
    assert set(load.answered) == {"at once"}, load.answered
