"""`lmi_vllm.ray:app` on a Ray cluster of three nodes: what Ray Serve's clients get, and keep.

Ray runs in an environment of its own (integration/ray.txt). The scripted engine answers, but for
the last test.
"""

import contextlib
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from integration.client import Answer, OpenStream, call, send, wait_until
from integration.conftest import RunningServer, clean_environment, running_server
from integration.fleet.ray_load import LMI, Load
from integration.fleet.ray_serve import ROOT, RayCluster, Replica, commands, ray_cluster
from lmi_vllm.features.ray_serve.arguments import read_arguments
from tests.golden.cases import Golden, load_golden
from tests.support.adapter_files import make_adapter
from tests.support.documentation import blocks_of
from tests.support.s3_server import BUCKET, s3_server

pytestmark = pytest.mark.random_order(disabled=True)  # one cluster, whose nodes come and go
SCRIPTED: Final = "--demo --engine scripted"
ONE_A_NODE: Final = {"num_replicas": 2, "max_replicas_per_node": 1}
VARIABLES: Final = {
    "LMI_SCRIPTED_SECONDS_PER_TOKEN": "0.001", "LMI_SCRIPTED_MAX_MODEL_LEN": "200000"
}  # fmt: skip
LONG: Final = {"inputs": "The sea is wide", "parameters": {"max_new_tokens": 100_000}}
ABORT_SECONDS: Final = 5.0
MANY_TOKENS: Final = 10_000
FEWER_TOKENS: Final = 2_000
HEADER: Final = "X-Amzn-SageMaker-Adapter-Identifier"
ANSWERED: Final = 'lmi_requests_total{.*dialect="lmi"'


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head without CPUs, and two nodes with one CPU each."""
    with ray_cluster(2) as running:
        running.deploy({"command": SCRIPTED, **VARIABLES}, 2, **ONE_A_NODE)
        yield running


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The same server without Ray."""
    folder = tmp_path_factory.mktemp("lone")
    with running_server(folder, *SCRIPTED.split(), environ=VARIABLES) as server:
        yield server


def shares(replicas: list[Replica], act: Callable[[], Answer], times: int) -> list[int]:
    """Return how many of some requests each replica answers."""
    before = [one.metric(ANSWERED) for one in replicas]
    assert [act().status for _ in range(times)] == [200] * times
    return [one.metric(ANSWERED) - known for one, known in zip(replicas, before, strict=True)]


WAYS: Final[Mapping[str, Callable[[str], tuple[str, Any, dict[str, str]]]]] = {
    "header": lambda name: ("/invocations", LMI, {HEADER: name}),
    "query": lambda name: (f"/invocations?adapter={name}", LMI, {}),
    "adapters": lambda name: ("/invocations", {**LMI, "adapters": name}, {}),
    "adapter_id": lambda name: (
        "/invocations", {**LMI, "parameters": {"max_new_tokens": 4, "adapter_id": name}}, {}
    ),
    "stream": lambda name: ("/invocations", {**LMI, "adapters": [name], "stream": True}, {}),
    "Ray's header": lambda name: (
        "/invocations", {**LMI, "adapters": name}, {"serve_multiplexed_model_id": name}
    ),
}  # fmt: skip


def test_an_adapter_stays_on_its_replica(cluster: RayCluster) -> None:
    """However it is named; the other adapter has the other replica, and the base model both."""
    replicas = cluster.replicas()
    assert len(replicas) == 2

    def ask_for(name: str, way: str) -> Answer:
        path, body, headers = WAYS[way](name)
        return call(cluster.url, path, body, headers=headers)

    places = {}
    for name in ("capitals", "json"):
        found = shares(replicas, lambda: ask_for(name, "adapters"), 1)  # noqa: B023 (called here)
        assert sorted(found) == [0, 1], found
        places[name] = found.index(1)
        time.sleep(1)  # Ray pushes what a replica has ten times a second
    assert sorted(places.values()) == [0, 1], places
    for name, way in itertools.product(places, WAYS):
        found = shares(replicas, lambda: ask_for(name, way), 3)  # noqa: B023 (called here)
        assert found[places[name]] == 3, (name, way, found)
    base = shares(replicas, lambda: call(cluster.url, "/invocations", LMI), 40)
    assert min(base) > 0, base


def test_a_slow_answer_keeps_no_other_adapter_from_its_replica(cluster: RayCluster) -> None:
    """Ray "loads" one id of a replica at a time; ids of clients that left are not kept."""
    replicas = cluster.replicas()

    def ask_for(name: str, tokens: int) -> Answer:
        body = {**LMI, "parameters": {"max_new_tokens": tokens}}
        headers = {"serve_multiplexed_model_id": name}
        return call(cluster.url, "/invocations", body, headers=headers)

    slow = [threading.Thread(target=ask_for, args=(f"slow-{n}", 4_000)) for n in range(4)]
    for thread in slow:
        thread.start()
    time.sleep(1)
    places = {}
    for name in ("fast-0", "fast-1", "fast-2", "fast-3"):
        found = shares(replicas, lambda: ask_for(name, 1), 1)  # noqa: B023 (called here)
        places[name] = found.index(1)
    assert all(thread.is_alive() for thread in slow)
    for thread in slow:
        thread.join()
    time.sleep(1)
    for name, place in places.items():
        found = shares(replicas, lambda: ask_for(name, 1), 4)  # noqa: B023 (called here)
        assert found[place] == 4, (name, places, found)


def ask(url: str, case: Golden) -> Answer:
    """Send a golden request."""
    body = None if case.method == "GET" else case.sent
    return call(url, case.path, body, method=case.method, headers=case.headers)


def test_golden_requests_get_the_bytes_of_a_lone_server(
    cluster: RayCluster, lone: RunningServer
) -> None:
    """Every dialect, whole and streamed, and every error: status, type and bytes."""
    cases = load_golden()
    assert len(cases) > 50
    for case in cases:
        through, direct = ask(cluster.url, case), ask(lone.url, case)
        assert through.status == direct.status, case.name
        assert through.body == direct.body, case.name
        assert through.headers.get("content-type") == direct.headers.get("content-type"), case.name


def test_parts_of_a_form_get_through(cluster: RayCluster, lone: RunningServer) -> None:
    """A multipart body of many pieces, longer than a buffer."""
    piece = b"x" * (1 << 20)
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + piece * 3
        + b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nlmi\r\n--b--\r\n'
    )  # fmt: skip
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    through, direct = (
        call(url, "/v1/audio/transcriptions", body, headers=headers)
        for url in (cluster.url, lone.url)
    )
    assert (through.status, through.body) == (direct.status, direct.body)


def in_flight(cluster: RayCluster) -> int:
    """Return the requests that all servers hold."""
    return sum(one.metric("lmi_requests_in_flight") for one in cluster.replicas())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_disconnects_aborts(cluster: RayCluster, *, is_streamed: bool) -> None:
    """As without Ray: the server holds nothing for it any more."""
    drop_and_see_the_abort(cluster, is_streamed=is_streamed)


def drop_and_see_the_abort(cluster: RayCluster, *, is_streamed: bool) -> None:
    """Disconnect from a request that runs."""
    assert in_flight(cluster) == 0
    if is_streamed:
        drop = OpenStream(cluster.url, "/invocations", {**LONG, "stream": True}).drop
    else:
        drop = send(cluster.url, "/invocations", LONG).close
    assert wait_until(lambda: in_flight(cluster) == 1, 10)
    drop()
    assert wait_until(lambda: in_flight(cluster) == 0, ABORT_SECONDS)


def test_a_stream_of_ten_thousand_tokens_is_whole(cluster: RayCluster, lone: RunningServer) -> None:
    """Every row, in order."""
    body = {**LONG, "parameters": {"max_new_tokens": MANY_TOKENS}, "stream": True}
    found = [call(url, "/invocations", body) for url in (cluster.url, lone.url)]
    assert len(found[0].lines()) == MANY_TOKENS
    assert found[0].body == found[1].body


def test_a_removed_node_loses_nothing_that_a_retry_saves(
    cluster: RayCluster, lone: RunningServer
) -> None:
    """The other replica answers; a new node gets a replica again."""
    expected = call(lone.url, "/invocations", LMI).body
    before = {one.process.pid for one in cluster.replicas()}
    with Load(cluster.url, expected) as load:
        assert wait_until(lambda: load.answered.total() > 50, 60)
        cluster.tell("remove 0")
        assert wait_until(lambda: len(cluster.replicas()) == 1, 30)  # its server ends with it
        known = load.answered.total()
        assert wait_until(lambda: load.answered.total() > known + 100, 90)
        cluster.tell("add")
        assert wait_until(
            lambda: {one.process.pid for one in cluster.replicas()} - before != set(), 60
        )
        known = load.answered.total()
        assert wait_until(lambda: load.answered.total() > known + 100, 90)
    print("removed node:", dict(load.answered))
    assert load.answered["at once"] > load.answered["repeated"]
    assert set(load.answered) <= {"at once", "repeated"}, load.answered


def test_a_server_that_dies_is_replaced(cluster: RayCluster, lone: RunningServer) -> None:
    """At once, and not after failed health checks."""
    expected = call(lone.url, "/invocations", LMI).body
    assert wait_until(lambda: len(cluster.replicas()) == 2, 60)
    victim = cluster.replicas()[0].process
    with Load(cluster.url, expected) as load:
        victim.kill()
        assert wait_until(
            lambda: len([r for r in cluster.replicas() if r.process.pid != victim.pid]) == 2, 60
        )
    assert set(load.answered) <= {"at once", "repeated"}, load.answered


def test_replicas_follow_the_requests(cluster: RayCluster) -> None:
    """One, two while requests run, one again; the stream that runs meanwhile is whole."""
    cluster.deploy(
        {"command": SCRIPTED, **VARIABLES},
        1,
        max_replicas_per_node=1,
        autoscaling_config={
            "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2,
            "upscale_delay_s": 0.5, "downscale_delay_s": 1, "metrics_interval_s": 0.5,
            "look_back_period_s": 1,
        },
    )  # fmt: skip
    body = {**LONG, "parameters": {"max_new_tokens": FEWER_TOKENS}, "stream": True}
    with contextlib.ExitStack() as dropped:
        for _ in range(4):
            stream = OpenStream(cluster.url, "/invocations", {**LONG, "stream": True})
            dropped.callback(stream.drop)
        assert wait_until(lambda: cluster.answering() == 2, 180)  # replicas have a niceness of 15
        last = OpenStream(cluster.url, "/invocations", body)
    rest = last.rest()
    assert rest.count(b"\n") == FEWER_TOKENS
    assert b"generated_text" in rest
    assert wait_until(lambda: len(cluster.replicas()) == 1, 60)
    assert call(cluster.url, "/invocations", LMI).status == 200


@pytest.mark.vllm
def test_the_real_engine_finds_adapters_in_s3(cluster: RayCluster, tmp_path: Path) -> None:
    """An adapter store instead of calls: the answers of a lone server, streamed and whole."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    with s3_server() as store:
        for seed in range(2):
            folder = make_adapter(tmp_path / f"own-{seed}", seed)
            files = {f"lora/{folder.name}/{file.name}": file for file in folder.iterdir()}
            store.put({name: file.read_bytes() for name, file in files.items()})
        variables = {
            **store.environ, "AWS_EC2_METADATA_DISABLED": "true", "LMI_S3_CLIENT": "boto3",
            "OPTION_ADAPTER_STORE": f"s3://{BUCKET}/lora/", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with running_server(tmp_path, "--demo", environ=variables) as lone:
            cluster.deploy({"command": "--demo", **variables}, 1, num_replicas=1)
            answers = [
                [call(url, "/invocations", body).body for body in real_bodies()]
                for url in (lone.url, cluster.url)
            ]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == len(answers[0])


def real_bodies() -> Iterator[dict[str, Any]]:
    """Requests for the base model and two adapters, streamed and whole."""
    for name, is_streamed in itertools.product(("", "own-0", "own-1"), (False, True)):
        yield {**LMI, "parameters": {"max_new_tokens": 8}, "adapters": name, "stream": is_streamed}


SERVE_SCHEMA: Final = (
    "import json, sys; from ray.serve.schema import ServeDeploySchema as S; "
    "[S.model_validate(json.loads(line)) for line in sys.stdin]"
)


def test_what_the_pages_show_is_ray_s() -> None:
    """Files of Ray Serve, in two manifests and on the page, by Ray's own schema; it can refuse."""
    folder = ROOT / "config" / "kubernetes"
    resources = [yaml.safe_load(path.read_text()) for path in folder.glob("ray-service*.yaml")]
    files = [yaml.safe_load(resource["spec"]["serveConfigV2"]) for resource in resources]
    blocks = [block for block in blocks_of("docs/scale-out.md") if block.language == "yaml"]
    files += [yaml.safe_load(block.text) for block in blocks]
    assert len(files) == 3
    bad = {**files[0], "proxy_location": "Nowhere"}
    for given, code in ((files, 0), ([bad], 1)):
        done = subprocess.run(
            [commands() / "python", "-c", SERVE_SCHEMA], text=True, capture_output=True,
            input="\n".join(map(json.dumps, given)), check=False, env=clean_environment(),
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    for file in files:
        (application,) = file["applications"]
        read_arguments(application["args"])
