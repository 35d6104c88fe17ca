"""Adapters on demand, over plain HTTP on the real engine: no call registers anything.

Proves that each way of naming an adapter fetches it from S3 and gets its own answer, which is
compared with the same weights registered by a call. An object that changes is served after the
refresh time. A bad adapter is refused without harm. Metrics and listings are right.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from integration.adapters_support import SINGLE_THREAD, StormClient, request_of, texts_of_answer
from integration.client import OpenStream, call, running_requests, send, wait_until
from integration.conftest import RunningServer, running_server
from integration.front_ends_share_one_engine import LONG, front_ends, stream
from tests.support.adapter_files import make_adapter
from tests.support.s3_server import BUCKET, S3Server, s3_server

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.random_order(disabled=True),  # counters of one server
]

PROMPT = StormClient.PROMPTS[0]
WAYS = (*StormClient.WAYS, "list")
REFRESH_SECONDS = "1"
CACHE_GB = "0.0107"  # 11 MiB: much for the adapters here, and too little for two of LARGE_BYTES
LARGE_BYTES = 7 << 20


def put(store: S3Server, name: str, folder: Path) -> None:
    """Store an adapter under a name."""
    store.put({f"lora/{name}/{file.name}": file.read_bytes() for file in folder.iterdir()})


def with_metadata(weights: Path, size: int) -> bytes:
    """Return a safetensors file with so much metadata: other files are not fetched."""
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = {"padding": "x" * size}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def ask(url: str, name: str, way: str) -> str:
    """Return the adapter's answer, asked for in one way."""
    path, body, headers = request_of([name], PROMPT, way)
    answer = call(url, path, body, headers=headers)
    assert answer.status == 200, answer.body
    return texts_of_answer(answer.body, way)[0]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters that answer unlike each other."""
    folder = tmp_path_factory.mktemp("weights")
    return [make_adapter(folder / str(seed), seed) for seed in range(len(WAYS) + 1)]


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    """An S3 store."""
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def server(store: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that finds its adapters in the store; its own two lie in the model directory."""
    folder = tmp_path_factory.mktemp("server")
    environ = {
        **SINGLE_THREAD,
        **store.environ,
        "AWS_EC2_METADATA_DISABLED": "true",
        "LMI_S3_CLIENT": "boto3",
        "SERVING_DOWNLOAD_DIR": str(folder / "cache"),
        "OPTION_MAX_CPU_LORAS": "3",  # and two slots
        "LMI_FRONTEND_PROCESSES": "2",  # requests meet either process; one of them asks the other
        "OPTION_ADAPTER_STORE": f"s3://{BUCKET}/lora/",
        "OPTION_ADAPTER_STORE_REFRESH_SECONDS": REFRESH_SECONDS,
        "OPTION_ADAPTER_STORE_CACHE_GB": CACHE_GB,
    }
    with running_server(folder, "--demo", environ=environ) as running:
        yield running


def test_every_way_of_naming_an_adapter_loads_it(
    server: RunningServer, store: S3Server, weights: list[Path]
) -> None:
    """Its answer is that of the same weights under a name that a call has registered."""
    url = server.url
    for way, folder in zip(WAYS, weights, strict=False):
        put(store, f"by-{way}", folder)
        cold = ask(url, f"by-{way}", way)
        registered = call(url, f"/adapters?name=own-{way}&src={folder}", method="POST")
        assert registered.status == 200, registered.body
        assert cold == ask(url, f"own-{way}", way)
        assert cold == ask(url, f"by-{way}", way)
    texts = {ask(url, f"by-{way}", "payload") for way in WAYS}
    assert len(texts) == len(WAYS), "adapters that answer alike prove nothing"
    listed = {one["name"]: one for one in call(url, "/adapters?limit=100").json()["adapters"]}
    assert listed["by-header"]["from_store"] is True
    assert "from_store" not in listed["own-header"]
    cards = {card["id"]: card for card in call(url, "/v1/models").json()["data"]}
    assert cards[cards["by-header"]["parent"]].get("parent") is None
    assert cards["by-header"]["root"] == f"s3://{BUCKET}/lora/by-header/"
    metrics = call(url, "/metrics").body.decode()
    cold_requests = re.search(r"lmi_cold_adapter_time_to_first_token_seconds_count (\S+)", metrics)
    assert cold_requests, metrics
    assert float(cold_requests[1]) == len(WAYS)


# docs/proposals/003-model-server-protocol of the Gateway API Inference Extension: what an endpoint
# picker reads of a model server, as vLLM calls it, and the labels that it needs.
PROTOCOL = {
    "vllm:num_requests_waiting": (),
    "vllm:num_requests_running": (),
    "vllm:kv_cache_usage_perc": (),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
    "vllm:lora_requests_info": ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    "vllm:num_gpu_loaded_lora_adapters": ("model_name", "engine"),
    "vllm:max_gpu_lora_adapters": ("model_name", "engine"),
}


def series(url: str, name: str) -> list[Sample]:
    """Return the samples of a series, which has to be a gauge."""
    text = call(url, "/metrics").body.decode()
    found = [one for one in text_string_to_metric_families(text) if one.name == name]
    assert [one.type for one in found] == ["gauge"], name
    return list(found[0].samples)


def test_router_sees_the_adapters_at_work(
    server: RunningServer, store: S3Server, weights: list[Path]
) -> None:
    """While they answer, by the names that requests give."""
    url = server.url
    for number in range(2):
        put(store, f"routed-{number}", weights[number])
    for name, labels in PROTOCOL.items():
        for sample in series(url, name):
            assert {*labels} <= {*sample.labels}, name
    (cache,) = series(url, "vllm:cache_config_info")
    assert min(int(cache.labels[label]) for label in PROTOCOL["vllm:cache_config_info"]) > 0
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 400, "ignore_eos": True}
    streams = [
        OpenStream(url, "/v1/completions", body | {"model": f"routed-{number}"})
        for number in range(2)
    ]
    seen: set[str] = set()
    deadline = time.monotonic() + 60
    while not {"routed-0", "routed-1"} <= seen:
        (sample,) = series(url, "vllm:lora_requests_info")
        seen |= {*filter(None, sample.labels["running_lora_adapters"].split(","))}
        assert time.monotonic() < deadline, seen
    assert sample.labels["max_lora"] == "2"  # of the embedded model
    assert abs(sample.value - time.time()) < 30
    for one in streams:
        one.drop()


def places(url: str) -> dict[str, str]:
    """Return where the workers hold each adapter."""
    samples = series(url, "vllm:lora_adapter_loaded")
    assert {one.labels["pinned"] for one in samples} == {"false"}
    return {one.labels["adapter_name"]: one.labels["level"] for one in samples}


def test_router_sees_where_the_adapters_are(
    server: RunningServer, store: S3Server, weights: list[Path]
) -> None:
    """Idle ones, too; one that lost its slot is in main memory, and then it has no series."""
    url = server.url
    for number in range(4):
        put(store, f"r{number}", weights[number])
        ask(url, f"r{number}", "payload")
    expected = {"r1": "cpu", "r2": "gpu", "r3": "gpu"}
    assert wait_until(lambda: places(url) == expected, 30), places(url)
    for name, count in (("num_gpu_loaded", 2), ("num_cpu_loaded", 3), ("max_gpu", 2)):
        (sample,) = series(url, f"vllm:{name}_lora_adapters")
        assert (sample.value, sample.labels["model_name"]) == (count, "lmi"), name
    (sample,) = series(url, "vllm:lora_requests_info")
    assert sample.labels["running_lora_adapters"] == "r2,r3"
    ask(url, "r0", "payload")
    expected = {"r2": "cpu", "r3": "gpu", "r0": "gpu"}
    assert wait_until(lambda: places(url) == expected, 30), places(url)
    for _ in range(3):  # either front-end process
        ask(url, "r2", "payload")
    expected = {"r2": "gpu", "r3": "cpu", "r0": "gpu"}
    assert wait_until(lambda: places(url) == expected, 30), places(url)


def test_router_sees_the_adapters_that_wait(
    server: RunningServer, store: S3Server, weights: list[Path]
) -> None:
    """One more than there are slots: its request waits for the end of another's."""
    url = server.url
    for number in range(3):
        put(store, f"queued-{number}", weights[number])
        ask(url, f"queued-{number}", "payload")
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    running = [
        OpenStream(url, "/v1/completions", body | {"model": f"queued-{number}"})
        for number in range(2)
    ]
    waiting = send(url, "/v1/completions", body | {"model": "queued-2", "max_tokens": 1})

    def seen() -> tuple[str, str]:
        (sample,) = series(url, "vllm:lora_requests_info")
        return sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]

    assert wait_until(lambda: seen() == ("queued-0,queued-1", "queued-2"), 60), seen()
    running[0].drop()
    assert waiting.getresponse().read().endswith(b"[DONE]\n\n")
    running[1].drop()
    waiting.close()
    assert wait_until(lambda: seen()[1] == "", 60), seen()


def test_unknown_and_damaged_adapters_are_refused(server: RunningServer, store: S3Server) -> None:
    """With the statuses of every adapter; the base model goes on."""
    store.put({"lora/broken/adapter_config.json": b"{}", "lora/broken/x": b"x"})
    for name, reason in (
        ("nowhere", "was not found"),
        ("broken", "has no adapter_model.safetensors"),
    ):
        lmi = {"inputs": PROMPT, "adapters": name}
        answer = call(server.url, "/invocations", lmi)
        assert (answer.status, reason in answer.body.decode()) == (424, True), answer.body
        openai = {"prompt": PROMPT, "model": name, "max_tokens": 2}
        assert call(server.url, "/v1/completions", openai).status in (400, 404)
    assert call(server.url, "/invocations", {"inputs": PROMPT}).status == 200


def test_changed_object_is_served_after_the_refresh_time(
    server: RunningServer, store: S3Server, weights: list[Path]
) -> None:
    """The same name answers as its new weights do; a cached prompt is no one else's."""
    url = server.url
    put(store, "changing", weights[0])
    old = ask(url, "changing", "payload")
    put(store, "changing", weights[-1])
    put(store, "reference", weights[-1])
    new = ask(url, "reference", "payload")
    assert new != old
    deadline = time.monotonic() + 60
    while (answer := ask(url, "changing", "payload")) != new:
        assert answer == old
        assert time.monotonic() < deadline, "the change never came"


def test_adapter_that_another_process_uses_is_not_moved_out(
    server: RunningServer, store: S3Server, weights: list[Path]
) -> None:
    """The one that was used last goes instead, and no request waits for the stream's end."""
    url = server.url
    for number, name in enumerate(("held", "large-0", "large-1")):
        put(store, name, weights[number])
    for number in range(2):
        padded = with_metadata(weights[number + 1] / "adapter_model.safetensors", LARGE_BYTES)
        store.put({f"lora/large-{number}/adapter_model.safetensors": padded})
    for pid in front_ends(server.process):  # either may be the one that decides
        connection, response = stream(url, pid, {**LONG, "adapters": "held"})
        first = response.read(1)
        for number in range(2):
            ask(url, f"large-{number}", "payload")
        found = {one["name"] for one in call(url, "/adapters?limit=100").json()["adapters"]}
        assert {"held", "large-0", "large-1"} & found == {"held", "large-1"}
        # Two where the engine has not yet dropped the stream that the last round has closed.
        assert running_requests(url), "the stream has to outlast the others"
        connection.close()
        assert first
