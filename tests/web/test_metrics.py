"""Metrics over HTTP: what a request leaves behind, and what is only known when asked for."""

import asyncio
import logging
import re

import pytest
from aiohttp.test_utils import TestClient
from prometheus_client.parser import text_string_to_metric_families

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.errors import EngineFailureError
from lmi_vllm.features.scripted.engine import Fail, ScriptedEngine
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.web.conftest import STREAM, A, B, GatedEngine, until

Key = tuple[str, frozenset[tuple[str, str]]]


async def samples(client: TestClient, path: str = "/metrics") -> dict[Key, float]:
    """Return every sample of ours."""
    text = await (await client.get(path)).text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("lmi_")
    }


def key(name: str, **labels: str) -> Key:
    """Return how a sample is found."""
    return name, frozenset(labels.items())


async def grown(client: TestClient, before: dict[Key, float]) -> dict[Key, float]:
    """Return by how much each sample has grown."""
    after = await samples(client)
    return {name: value - before.get(name, 0) for name, value in after.items()}


async def test_a_request_is_counted_by_its_outcome(serve: ServeScripted) -> None:
    """Once, under its route, dialect, adapter and status, with its tokens and times."""
    client = await serve()
    before = await samples(client)
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 4}}
    await (await client.post("/predictions/demo", json=body)).read()
    more = await grown(client, before)
    route = {"route": "/predictions/{model}", "dialect": "lmi", "adapter": "base"}
    assert more[key("lmi_requests_total", **route, status="200")] == 1
    assert more[key("lmi_prompt_tokens_total", adapter="base")] == 3
    assert more[key("lmi_generated_tokens_total", adapter="base")] == 4
    for name in ("time_to_first_token", "time_per_output_token", "queue_time", "request_duration"):
        assert more[key(f"lmi_{name}_seconds_count", dialect="lmi")] == 1, name


async def test_openai_payloads_count_as_openai_wherever_they_come(serve: ServeScripted) -> None:
    """The dialect is the payload's, the route the one that was used."""
    client = await serve()
    before = await samples(client)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path in ("/invocations", "/v1/chat/completions"):
        await (await client.post(path, json=chat)).read()
    more = await grown(client, before)
    for path in ("/invocations", "/v1/chat/completions"):
        labels = {"route": path, "dialect": "openai", "adapter": "base", "status": "200"}
        assert more[key("lmi_requests_total", **labels)] == 1, path


async def test_names_that_clients_choose_become_no_label(serve: ServeScripted) -> None:
    """Neither unknown paths nor unknown adapters nor odd methods."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    before = await samples(client)
    for number in range(5):
        await client.get(f"/no-such-{number}")
        await client.request(f"METHOD{number}", "/ping")
        await client.post("/invocations", json={"inputs": "x", "adapters": f"invented-{number}"})
    more = await grown(client, before)
    other = {"route": "other", "dialect": "server", "adapter": "base", "status": "404"}
    assert more[key("lmi_requests_total", **other)] == 5
    text = str(list(more))
    assert not re.search("no-such|invented|METHOD", text)


async def test_an_adapter_is_named_and_counted(serve: ServeScripted) -> None:
    """In the labels of its requests, and among the registered and the loaded ones."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    registry = client.app[SERVICE].runtime.adapters
    await registry.register(Adapter("kept", "/kept"))
    await registry.register(Adapter("listed", "/listed", preload=False))
    await (await client.post("/invocations", json={"inputs": "x", "adapters": "kept"})).read()
    found = await samples(client)
    labels = {"route": "/invocations", "dialect": "lmi", "adapter": "kept", "status": "200"}
    assert found[key("lmi_requests_total", **labels)] >= 1
    assert found[key("lmi_adapters_registered")] == 2
    assert found[key("lmi_adapters_loaded")] == 1


async def test_a_stream_that_breaks_is_an_error_although_its_status_was_200(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """Its fault is counted, and said in its line."""
    engine.script = [A, Fail(EngineFailureError("broken"))]
    client = await serve()
    before = await samples(client)
    await (await client.post("/invocations", json=STREAM)).read()
    assert (await grown(client, before))[key("lmi_stream_errors_total", fault="engine")] == 1


@pytest.mark.parametrize("engine", [GatedEngine()], ids=["gated"])
async def test_client_disconnect_is_counted(serve: ServeScripted, engine: GatedEngine) -> None:
    """As 499, and as a disconnect."""
    engine.script = [A, A, B]
    client = await serve()
    before = await samples(client)
    response = await client.post("/invocations", json=STREAM)
    await response.content.readline()
    response.close()
    await until(lambda: not engine.running_requests)
    more = await grown(client, before)
    labels = {"route": "/invocations", "dialect": "lmi", "adapter": "base", "status": "499"}
    assert more[key("lmi_requests_total", **labels)] == 1
    assert more[key("lmi_client_disconnects_total", dialect="lmi")] == 1


async def test_the_queue_and_the_state_are_those_of_now(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """Depth, limit and state are read at each scrape."""
    engine.seconds_per_token = 30
    client = await serve(limit=7)
    running = asyncio.create_task(client.post("/invocations", json={"inputs": "x"}))
    await until(lambda: engine.running_requests == 1)
    found = await samples(client, "/server/metrics")
    assert found[key("lmi_requests_in_flight")] == 1
    assert found[key("lmi_queue_limit")] == 7
    assert found[key("lmi_state", state="Healthy")] == 1
    assert found[key("lmi_state", state="PENDING")] == 0
    running.cancel()


async def test_some_metrics_can_be_picked(serve: ServeScripted) -> None:
    """`name[]` as in LMI, more than once; an unknown name picks nothing."""
    client = await serve()
    text = await (await client.get("/metrics?name[]=lmi_queue_limit&name[]=lmi_none")).text()
    assert {line.split("{")[0].split()[0] for line in text.splitlines() if line[0] != "#"} == {
        "lmi_queue_limit"
    }


async def test_access_log_masks_query_values_that_may_be_secret(
    serve: ServeScripted, caplog: pytest.LogCaptureFixture
) -> None:
    """Values of unknown names and of addresses are masked; line breaks cannot forge a line."""
    client = await serve()
    with caplog.at_level(logging.DEBUG, "lmi_vllm.requests"):
        await client.get("/ping?api_key=SENTINEL&x=%0ASENTINEL&%53ENT=1&model_name=demo")
        await client.post("/ping?name=a&src=s3://u:SENTINEL@b/?X-Amz-Signature=SENTINEL")
    lines = [line.getMessage() for line in caplog.records if line.name == "lmi_vllm.requests"]
    assert [re.search('"(.*?)"', line)[1] for line in lines] == [  # type: ignore[index]
        "GET /ping?api_key=***&x=***&SENT=***&model_name=demo HTTP/1.1",
        "POST /ping?name=a&src=*** HTTP/1.1",
    ]
    ours = [vars(line) for line in caplog.records if line.name != "aiohttp.access"]  # test's own
    assert "SENTINEL" not in str(ours)


async def test_the_line_of_a_request_has_its_figures_as_fields(
    serve: ServeScripted, caplog: pytest.LogCaptureFixture
) -> None:
    """For readers of JSON."""
    client = await serve()
    with caplog.at_level(logging.INFO):
        body = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}
        await client.post("/invocations", json=body, headers={"x-request-id": "mine"})
    (line,) = [one for one in caplog.records if one.name == "lmi_vllm.requests"]
    fields = line.fields  # type: ignore[attr-defined]
    assert (fields["request_id"], fields["route"], fields["status"]) == (
        "mine",
        "/invocations",
        200,
    )
    assert (fields["prompt_tokens"], fields["generated_tokens"]) == (2, 3)
    assert "RequestId=[mine] prompt_tokens=2 generated_tokens=3" in line.getMessage()
