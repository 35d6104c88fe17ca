"""Two replicas on the real engine over one `option.adapters_state` in S3, by plain HTTP.

Proves that a call on one replica changes the other, too, and that `wait=true` is answered after
that. A new replica is ready only with all shared adapters. While S3 is unreachable both go on.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.adapters_support import SINGLE_THREAD, StormClient, request_of, texts_of_answer
from integration.client import call
from integration.conftest import ServerProcess, StartServer
from tests.support.adapter_files import make_adapter
from tests.support.s3_server import BUCKET, Refusal, S3Server, s3_server

pytestmark = pytest.mark.vllm

STATE = f"s3://{BUCKET}/fleet/adapters.json"
PROMPT = StormClient.PROMPTS[0]


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    """An S3 store with two adapters."""
    with s3_server() as running:
        yield running


def put(store: S3Server, name: str, folder: Path, prefix: str = "lora") -> str:
    """Store an adapter and return its URL."""
    store.put({f"{prefix}/{name}/{file.name}": file.read_bytes() for file in folder.iterdir()})
    return f"s3://{BUCKET}/{prefix}/{name}/"


def ask(url: str, name: str) -> str:
    """Return the adapter's answer, or its status where it is none."""
    path, body, headers = request_of([name], PROMPT, "payload")
    answer = call(url, path, body, headers=headers)
    return (
        texts_of_answer(answer.body, "payload")[0] if answer.status == 200 else str(answer.status)
    )


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Return as soon as the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.1)


def test_two_replicas_have_one_set_of_adapters(
    server_process: StartServer, store: S3Server, tmp_path: Path
) -> None:
    """From the first registration to a replica that is killed, and one that starts."""
    environ = {
        **SINGLE_THREAD,
        **store.environ,
        "AWS_EC2_METADATA_DISABLED": "true",
        "LMI_S3_CLIENT": "boto3",
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
        "OPTION_ADAPTERS_STATE": STATE,
        "OPTION_ADAPTERS_STATE_REFRESH_SECONDS": "0.5",
        "OPTION_ADAPTER_STORE": f"s3://{BUCKET}/found/",
    }
    sources = [put(store, name, make_adapter(tmp_path / name, seed)) for seed, name in
               enumerate(("fr", "de"))]  # fmt: skip
    # The second answers with two processes, of which only the first reads the state.
    further = {"LMI_FRONTEND_PROCESSES": "2"}
    servers = [
        server_process("--demo", "--port", "0", environ={**environ, **more}, is_forked=True)
        for more in ({}, further)
    ]
    a, b = (server.url_when_ready() for server in servers)

    french = _one_call_is_enough(a, b, sources[0])
    own = make_adapter(tmp_path / "own", 7)
    assert call(a, f"/adapters?name=own&src={own}", method="POST").status == 200
    until(lambda: ask(b, "own") != "424")  # the folder is on this machine: b has it, too
    assert call(b, "/adapters/own?wait=true", method="DELETE").status == 200
    assert ask(a, "own") == "424"
    for name in ("kept", "gone"):
        put(store, name, own, "found")
    _calls_on_found_adapters_hold_everywhere(a, b)
    _store_goes_and_comes_back(a, b, store, str(own))
    assert ask(a, "fr") == ask(b, "fr") == french
    servers[1].kill()
    _replica_comes_and_goes(
        server_process("--demo", "--port", "0", environ=environ, is_forked=True), a, store
    )
    shared = store.client.get_object(Bucket=BUCKET, Key="fleet/adapters.json")["Body"].read()
    assert sorted(one["name"] for one in json.loads(shared)["adapters"]) == ["fr", "local"]


def _one_call_is_enough(a: str, b: str, src: str) -> str:
    """Register on one: both answer, with the same text; the call has waited for it."""
    registered = call(a, f"/adapters?name=fr&src={src}&wait=true", method="POST")
    assert registered.status == 200, registered.body
    french = ask(b, "fr")
    assert french == ask(a, "fr") != ask(a, "")
    assert call(b, "/adapters/fr").json() == call(a, "/adapters/fr").json()
    for lora_path, status in ((src, 200), (f"{src}-other", 400)):  # a controller calls each
        body = {"lora_name": "fr", "lora_path": lora_path}
        assert call(b, "/v1/load_lora_adapter", body).status == status
    return french


def _calls_on_found_adapters_hold_everywhere(a: str, b: str) -> None:
    """A pin through one; a removal through one that has not found the adapter itself."""
    assert ask(a, "kept") == ask(b, "kept") != "424"
    pinned = call(a, "/adapters/kept/update?pin=true&wait=true", method="POST", seconds=120)
    assert (pinned.status, call(b, "/adapters/kept").json()["pin"]) == (200, True), pinned.body
    until(lambda: call(a, "/adapters/kept").json() == call(b, "/adapters/kept").json())
    assert ask(b, "gone") != "424"
    for name in ("kept", "gone"):
        removed = call(a, f"/adapters/{name}?wait=true", method="DELETE", seconds=120)
        assert removed.status == 200, removed.body
        assert [ask(url, name) for url in (a, b, a, b)] == ["424"] * 4


def _store_goes_and_comes_back(a: str, b: str, store: S3Server, own: str) -> None:
    """Both serve on and say so; what was done meanwhile is shared afterwards."""
    store.refusal = Refusal(503, "SlowDown")
    assert call(b, f"/adapters?name=local&src={own}", method="POST", seconds=120).status == 200
    until(lambda: "adapters_state" in call(b, "/ready").body.decode())
    assert call(b, "/ready").status == 200
    with ThreadPoolExecutor(1) as client:
        path = "/adapters/local/update?pin=true&wait=true"
        waiting = client.submit(call, b, path, method="POST", seconds=120)
        until(lambda: call(b, "/adapters/local").json()["pin"] is True)
        store.refusal = None
        answer = waiting.result()
    assert (answer.status, answer.json()) == (200, {"status": "Adapter local updated"})
    until(lambda: ask(a, "local") == ask(b, "local") != "424")
    until(lambda: "adapters_state" not in call(b, "/ready").body.decode())
    until(lambda: call(a, "/adapters/local").json()["pin"] is True)


def _replica_comes_and_goes(third: ServerProcess, a: str, store: S3Server) -> None:
    """It is ready with all of them, and takes its report with it; the killed one is no trouble."""
    c = third.url_when_ready()
    assert ask(c, "fr") == ask(a, "fr") != "424"
    assert ask(c, "local") == ask(a, "local")
    assert ask(c, "gone") == "424", "a call has removed it before this replica was there"
    metrics = call(c, "/metrics").body.decode()
    assert "lmi_adapters_state_missing 0.0" in metrics
    reports = "fleet/adapters.json.replicas/"
    keys = {one["Key"] for one in listed(store, reports)}
    third.process.send_signal(signal.SIGTERM)
    assert third.wait_exit() == 0
    gone = keys - {one["Key"] for one in listed(store, reports)}
    assert len(gone) == 1, "a replica that ends takes its report with it"


def listed(store: S3Server, prefix: str) -> list[dict[str, str]]:
    """Return the objects below a prefix."""
    found: list[dict[str, str]] = store.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)[
        "Contents"
    ]
    return found
