"""Adapters that something finds when a request names them (`AdapterRegistry.find`)."""

import asyncio
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import Dialect, NotReadyError
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.hooks import Hooks
from lmi_vllm.messages import HttpRoute, InferenceCall, RouteKind, ServingProfile
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.support.adapter_hooks import hook
from tests.support.other_replicas import Others
from tests.support.scripted_application import EchoingApplication
from tests.web.conftest import call

MESSAGES = HttpRoute(
    "/v1/messages", frozenset({"POST"}), RouteKind.INFERENCE, Dialect.ANTHROPIC
)  # fmt: skip
HEADER = {"X-Amzn-SageMaker-Adapter-Identifier": "fr"}


class OnDemandFinder:
    """Registers `fr`, and keeps the names that it was asked for."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self.asked: list[str] = []
        self._registry = registry
        hook(registry, find=self)

    async def __call__(self, name: str) -> bool:
        """Register it, once."""
        self.asked.append(name)
        if name == "fr" and name not in self._registry:
            await self._registry.register(
                Adapter(name, "s3://x/fr/", path="/fr", is_from_store=True)
            )
        return name == "fr"


def finder_of(client: TestClient) -> OnDemandFinder:
    """Have something find the adapters of a client's server."""
    return OnDemandFinder(client.app[SERVICE].runtime.adapters)


WAYS = pytest.mark.parametrize(
    ("path", "body", "options"),
    [
        ("/invocations", {"inputs": "x"}, {"headers": HEADER}),
        ("/invocations", {"inputs": "x"}, {"params": {"adapter": "fr"}}),
        ("/invocations", {"inputs": "x", "adapters": "fr"}, {}),
        ("/invocations", {"inputs": ["x", "y"], "adapters": ["", "fr"]}, {}),
        ("/invocations", {"prompt": "x", "model": "fr"}, {}),
        ("/v1/completions", {"prompt": "x", "model": "fr"}, {}),
        ("/v1/chat/completions", {"messages": [], "model": "fr"}, {}),
        ("/v1/chat/completions", {"messages": [], "model": "demo"}, {"headers": HEADER}),
        ("/v1/messages", {"messages": [], "model": "fr"}, {}),
    ],
)


@WAYS
async def test_every_way_of_naming_an_adapter_finds_it(
    lora: TestClient,
    engine: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """The request is answered by the load that was made for it."""
    engine.http = application = EchoingApplication(engine, (MESSAGES,))
    finder_of(lora)
    assert (await call(lora, "POST", path, json=body, **options))[0] == 200
    used = [one.adapter for one in (*engine.jobs, *engine.calls, *application.calls)]
    assert engine.adapters["fr"] in used
    assert [one for one in used if one is not None and one.name != "fr"] == []


class Unloaded(Others):
    """Another replica has `fr`, which this one cannot load."""

    async def arrive(self, name: str) -> None:
        """Refuse it."""
        if name == "fr":
            raise NotReadyError("not loaded here")


@WAYS
async def test_an_adapter_of_another_replica_is_no_unknown_name(
    lora: TestClient,
    engine: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """However it is named, without anything that finds adapters; never the base model instead."""
    engine.http = application = EchoingApplication(engine, (MESSAGES,))
    hook(lora.app[SERVICE].runtime.adapters, sharing=Unloaded())
    assert (await call(lora, "POST", path, json=body, **options))[0] == 503
    assert [*engine.jobs, *engine.calls, *application.calls] == []


class Marking:
    """An input hook that leaves its mark."""

    def undecoded(self, _: InferenceCall) -> object:
        """Read nothing."""
        raise AssertionError

    async def __call__(self, _: InferenceCall, payload: Any) -> dict[str, Any]:
        """Return the payload with it."""
        return {**payload, "marked": True}


@pytest.mark.parametrize(
    ("model", "headers"), [("fr", {}), ("demo", HEADER)], ids=["model", "header"]
)
async def test_code_of_an_adapter_sees_its_first_request(
    lora: TestClient, engine: ScriptedEngine, model: str, headers: dict[str, str]
) -> None:
    """Also on a route of vLLM's, where the adapter was not known as the request came."""
    engine.http = application = EchoingApplication(engine, (MESSAGES,))
    finder_of(lora)

    async def code(*_: object) -> Hooks:
        return Hooks(input=Marking())

    lora.app[SERVICE].runtime.adapters._loads._load_code = code
    body = {"messages": [], "model": model}
    for _ in range(2):
        assert (await call(lora, "POST", "/v1/messages", json=body, headers=headers))[0] == 200
    assert [one.body["marked"] for one in engine.calls] == [True, True]
    assert application.calls == []


class Shortening(Marking):
    """An input hook that leaves nothing too long."""

    async def __call__(self, _: InferenceCall, payload: Any) -> dict[str, Any]:
        """Return the messages."""
        return {"messages": payload["messages"]}


@pytest.mark.parametrize(
    ("code", "status", "loaded"),
    [(Hooks(), 400, False), (Hooks(input=Shortening()), 200, True)],
    ids=["no code", "code"],
)
async def test_a_request_beyond_the_limits_loads_no_adapter(
    lora: TestClient, engine: ScriptedEngine, code: Hooks, status: int, *, loaded: bool
) -> None:
    """On a route of vLLM's; code of the adapter's may change what is asked, so it goes first."""
    engine.http = application = EchoingApplication(engine, (MESSAGES,))
    registry = lora.app[SERVICE].runtime.adapters

    async def load_code(*_: object) -> Hooks:
        return code

    registry._loads._load_code = load_code
    await registry.register(Adapter("fr", "/fr", preload=False))
    body = {"messages": [], "model": "fr", "stop_sequences": ["x"] * 65}
    assert (await call(lora, "POST", "/v1/messages", json=body))[0] == status
    assert ("fr" in engine.adapters, application.calls) == (loaded, [])


async def test_requests_that_name_nothing_find_nothing(lora: TestClient) -> None:
    """Nothing is asked for the base model."""
    finder = finder_of(lora)
    for body in ({"prompt": "x", "model": ""}, {"prompt": "x", "model": None}, {"prompt": "x"}):
        assert (await call(lora, "POST", "/v1/completions", json=body))[0] == 200
    body = {"inputs": "x", "adapters": "", "model": "fr"}
    assert (await call(lora, "POST", "/invocations", json=body))[0] == 200
    assert finder.asked == []


async def test_unknown_name_is_refused_as_without_it(lora: TestClient) -> None:
    """What is not found is no other model's request."""
    finder = finder_of(lora)
    answer = await call(lora, "POST", "/invocations", json={"inputs": "x", "adapters": "de"})
    assert answer[0] == 424
    assert finder.asked == ["de"]


async def check_registers_over(
    client: TestClient, engine: ScriptedEngine, path: str, body: object
) -> None:
    """A call at `path` takes the place of what was found, and another one does not."""
    finder_of(client)
    await call(client, "POST", "/invocations", json={"inputs": "x", "adapters": "fr"})
    assert (await call(client, "POST", path, json=body))[0] == 200
    assert engine.adapters["fr"].path == "/own"
    assert (await call(client, "POST", path, json=body))[0] in (400, 409)


async def test_predict_timeout_applies_while_an_adapter_is_fetched(
    serve: ServeScripted,
) -> None:
    """A store that hangs holds no request for ever."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True, predict_timeout=0.05))

    async def find(_: str) -> bool:
        return await asyncio.Event().wait()

    hook(client.app[SERVICE].runtime.adapters, find=find)
    for body in ({"inputs": "x", "adapters": "fr"}, {"inputs": "x", "model": "fr"}):
        status, answer = await call(client, "POST", "/invocations", json=body)
        assert (status, "predict_timeout" in str(answer)) == (500, True)


async def test_store_that_is_away_is_503(lora: TestClient) -> None:
    """So that a router asks another replica."""

    async def find(_: str) -> bool:
        raise NotReadyError("away")

    hook(lora.app[SERVICE].runtime.adapters, find=find)
    payload = {"inputs": "x", "adapters": "fr"}
    assert (await call(lora, "POST", "/invocations", json=payload))[0] == 503
