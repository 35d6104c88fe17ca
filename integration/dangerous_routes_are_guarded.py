"""Routes of vLLM's that act on the server: there with vLLM's switch, with a key, at one address.

And what a user puts around vLLM's application (`--middleware`), which the same server has.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from integration.client import Answer, call, running_requests, wait_until
from integration.conftest import RunningServer, start_server
from lmi_vllm.config.vllm_schema import installed_version
from tests.support.vllm_routes import script

pytestmark = pytest.mark.vllm
PAGE = script("vllm_routes_page")
RELEASE: Final = PAGE.recorded()[".".join(str(installed_version()).split(".")[:2])]
KEY: Final = {"x-api-key": "sesame-open"}
DEV_MODE: Final = "VLLM_SERVER_DEV_MODE"
PROMPT: Final = {"model": "lmi", "prompt": "The capital of France is", "max_tokens": 2}
MIDDLEWARE: Final = """
async def mark(request, call_next):
    response = await call_next(request)
    response.headers["x-marked"] = "yes"
    return response
"""
Routes = list[tuple[str, str]]


def _acting(switch: str | None) -> Routes:
    """Return methods and paths of what acts on the server and is there with that switch alone."""
    needs = [] if switch is None else [switch]
    return [
        (row["methods"][0], path)
        for path, row in RELEASE.items()
        if PAGE.answers()[path].get("acts") == "management" and row["needs"] == needs
    ]


@dataclass(frozen=True)
class Guarded:
    """A server with every switch on, a key, and an address for management."""

    inference: str
    management: str
    traces: Path

    def act(self, path: str, body: object = None, method: str = "POST") -> Answer:
        """Call a management route as who has the key does."""
        return call(self.management, path, body, method=method, headers=KEY)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """It, started once: keys, addresses and switches are those of a process."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "marks.py").write_text(MIDDLEWARE, encoding="utf-8")
    environ = {
        DEV_MODE: "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "LMI_API_KEY": KEY["x-api-key"],
        "SERVING_MANAGEMENT_ADDRESS": "http://127.0.0.1:0",
        "OPTION_PROFILER_CONFIG": f'{{"profiler":"torch","torch_profiler_dir":"{folder}/traces"}}',
        "OPTION_MIDDLEWARE": "marks.mark",
        "PYTHONPATH": f"{Path(__file__).parent.parent}:{folder}",
    }
    server = start_server(folder, "--demo", "--port", "0", environ=environ, is_forked=True)
    try:
        management = server.wait_for_line("Management on ", 20).split()[-1]
        inference = server.url_when_ready()
        yield Guarded(inference, management, folder / "traces")
    finally:
        server.kill()


def test_switch_that_is_off_leaves_no_route(demo_server: RunningServer) -> None:
    """404 as for any other path; what needs no switch still needs a key."""
    off = [*_acting(DEV_MODE), *_acting("--profiler-config")]
    assert len(off) > 20
    for method, path in off:
        assert call(demo_server.url, path, method=method).status == 404, path
    for method, path in _acting(None):
        answer = call(demo_server.url, path, b"{}", method=method)
        assert (answer.status, b"LMI_API_KEY" in answer.body) == (401, True), path


def test_dev_switch_without_an_api_key_exposes_no_route(tgi_server: RunningServer) -> None:
    """All of them name the key that is to be set, and the engine answers as before."""
    for method, path in _acting(DEV_MODE):
        answer = call(tgi_server.url, path, b"{}", method=method)
        assert (answer.status, b"LMI_API_KEY" in answer.body) == (401, True), path
    assert call(tgi_server.url, "/v1/completions", PROMPT).status == 200


def test_key_opens_them_at_the_management_address_only(guarded: Guarded) -> None:
    """The address of inference knows none of them, with the key; the other refuses a wrong one."""
    wrong = {"x-api-key": "wrong"}
    for method, path in [*_acting(DEV_MODE), *_acting("--profiler-config"), *_acting(None)]:
        here = call(guarded.inference, path, b"{}", method=method, headers=KEY)
        assert here.status == 404, path
        there = [
            call(guarded.management, path, b"{}", method=method, headers=headers).status
            for headers in ({}, wrong)
        ]
        assert there == [401, 401], path


@pytest.mark.parametrize("path", ["/adapters", "/v1/load_lora_adapter"])
def test_inference_address_loads_no_adapter_by_path(guarded: Guarded, path: str) -> None:
    """Neither by vLLM's routes, which its switch has laid out, nor by SageMaker's."""
    body = {"name": "x", "src": "/tmp", "lora_name": "x", "lora_path": "/tmp"}
    assert call(guarded.inference, path, body, headers=KEY).status == 404


def test_guarded_routes_match_vllm(guarded: Guarded) -> None:
    """Information, calls of the workers, caches and weights: what is malformed is vLLM's 400."""
    assert b"vllm_config" in guarded.act("/server_info", method="GET").body
    assert guarded.act("/get_world_size", method="GET").json() == {"world_size": 1}
    assert guarded.act("/collective_rpc", {"method": "list_loras"}).status == 200
    assert guarded.act("/collective_rpc", {}).status == 400
    assert guarded.act("/reset_prefix_cache").status == 200
    assert guarded.act("/update_weights", {}).status == 400


def test_profile_is_written(guarded: Guarded) -> None:
    """Between start and stop, by the engine's process."""
    assert guarded.act("/start_profile").status == 200
    assert call(guarded.inference, "/v1/completions", PROMPT, headers=KEY).status == 200
    assert guarded.act("/stop_profile").status == 200
    deadline = time.monotonic() + 60
    while not any(guarded.traces.rglob("*.json*")):
        assert time.monotonic() < deadline, "no trace"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("rest", "wake"),
    [("/sleep?level=1", "/wake_up"), ("/pause", "/resume")],
    ids=["sleep", "pause"],
)
def test_engine_that_sleeps_refuses_by_name(guarded: Guarded, rest: str, wake: str) -> None:
    """On a CPU it keeps its memory and schedules nothing: requests are refused, not held."""
    assert guarded.act(rest).status == 200
    assert guarded.act("/is_sleeping", method="GET").json() == {"is_sleeping": True}
    for path, body in (
        ("/v1/completions", PROMPT),
        ("/v1/messages", {"model": "lmi", "max_tokens": 1, "messages": []}),
        ("/invocations", {"inputs": "x"}),
    ):
        answer = call(guarded.inference, path, body, headers=KEY, seconds=20)
        assert (answer.status, b"is asleep" in answer.body) == (503, True), path
    health = call(guarded.inference, "/ping")
    assert (health.status, health.json()) == (503, {"model": {"status": "Asleep"}})
    assert call(guarded.inference, "/ready").status == 503
    assert call(guarded.inference, "/live").status == 200
    assert guarded.act(wake).status == 200
    assert call(guarded.inference, "/ping").status == 200
    assert call(guarded.inference, "/ready").status == 200
    assert call(guarded.inference, "/v1/completions", PROMPT, headers=KEY).status == 200


def _long(path: str, *, stream: bool) -> dict[str, object]:
    """Return a request that would run for minutes."""
    long = {"model": "lmi", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    if path == "/invocations":
        parameters = {"max_new_tokens": 1900, "ignore_eos_token": True}
        return {"inputs": "Once upon a time", "parameters": parameters, "stream": stream}
    if path == "/v1/responses":
        return {**long, "input": "Once upon a time", "max_output_tokens": 1900, "max_tokens": None}
    if path == "/v1/completions":
        return {**long, "prompt": "Once upon a time"}
    return {**long, "messages": [{"role": "user", "content": "Once upon a time"}]}


def test_requests_that_a_pause_ends_are_not_taken_for_complete(guarded: Guarded) -> None:
    """A 500, or an error as a stream's last row, on every route that generates."""
    paths = ("/invocations", "/v1/completions", "/v1/chat/completions", "/v1/responses")
    asked = [(path, stream) for path in paths for stream in (False, True)]
    asked.remove(("/v1/responses", True))  # behind a middleware vLLM cuts it without an event
    with ThreadPoolExecutor(len(asked)) as pool:
        running = [
            pool.submit(
                call, guarded.inference, path, _long(path, stream=stream), headers=KEY, seconds=60
            )
            for path, stream in asked
        ]
        assert wait_until(lambda: running_requests(guarded.management, KEY) == len(asked), 20)
        assert guarded.act("/pause").status == 200
        answers = [each.result() for each in running]
        assert guarded.act("/resume").status == 200
    for (path, stream), answer in zip(asked, answers, strict=True):
        assert answer.status == (200 if stream else 500), (path, answer.body[-300:])
        assert b"the engine ended this request" in answer.body, (path, stream, answer.body[-300:])
        assert b'"abort"' not in answer.body, (path, stream)
        assert b'"response.completed"' not in answer.body


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_middleware_is_around_openai_requests(guarded: Guarded, path: str) -> None:
    """Also around those that have a faster lane otherwise; whole and streamed."""
    for body in (PROMPT, {**PROMPT, "stream": True}):
        answer = call(guarded.inference, path, body, headers=KEY)
        assert (answer.status, answer.headers.get("x-marked")) == (200, "yes")


def test_load_header_is_sent_on_request(demo_server: RunningServer) -> None:
    """ORCA's header, with the engine's own figures; a stream has none."""
    asked = {"endpoint-load-metrics-format": "TEXT"}
    for path, body in (("/v1/completions", PROMPT), ("/invocations", {"inputs": "x"})):
        found = call(demo_server.url, path, body, headers=asked).headers["endpoint-load-metrics"]
        assert found.startswith("TEXT named_metrics.num_requests_waiting=")
        assert ", named_metrics.kv_cache_usage_perc=" in found
        streamed = call(demo_server.url, path, {**body, "stream": True}, headers=asked)
        assert "endpoint-load-metrics" not in streamed.headers
