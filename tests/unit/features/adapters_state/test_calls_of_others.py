"""Calls and requests on a replica that has not read, or cannot load, what another's call did."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.errors import AdapterConflictError, NotReadyError, ResourceNotFoundError
from lmi_vllm.features.adapters_state import reconciler, sharing
from tests.support.adapter_hooks import hook
from tests.support.s3_server import S3Server
from tests.unit.features.adapters_state.conftest import AWAY, Replica, Start


async def pair(start: Start) -> tuple[Replica, Replica]:
    """Return two replicas that share nothing yet."""
    return await start("a").begin(), await start("b").begin()


async def test_a_call_sees_another_servers_call(start: Start) -> None:
    """Within the refresh time as well: its name is taken, updated as it is, or gone."""
    a, b = await pair(start)
    await a.registry.register(Adapter("fr", "/v1"))
    await b.registry.refresh("fr")
    with pytest.raises(AdapterConflictError):
        await b.registry.register(Adapter("fr", "/own"))
    await a.registry.replace(Adapter("fr", "/v2"), 5)
    await b.registry.refresh("fr")
    assert b.registry.describe("fr").src == "/v2"
    await a.registry.unregister("fr", 5)
    await b.registry.refresh("fr")
    with pytest.raises(ResourceNotFoundError):
        b.registry.describe("fr")


async def test_a_call_waits_for_a_load_that_has_begun(start: Start) -> None:
    """A removal right after the registration is no 404."""
    a, b = await pair(start)
    b.gate = threading.Event()
    await a.registry.register(Adapter("fr", "/fr"))
    refreshed = asyncio.create_task(b.registry.refresh("fr"))
    await asked(b)
    await asyncio.wait({refreshed}, timeout=1.5 * sharing.RECONCILE_SECONDS)
    assert not refreshed.done()
    b.gate.set()
    await asyncio.wait_for(refreshed, 60)
    assert b.names == ["fr"]


async def test_a_call_uses_the_known_adapters_while_the_store_is_unreachable(
    start: Start, empty_store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a store that does not answer no longer than it has to."""
    monkeypatch.setattr(sharing, "READ_SECONDS", 0.05)
    a = await start("a").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    empty_store.refusal = AWAY
    await asyncio.wait_for(a.registry.refresh("fr"), 60)
    empty_store.refusal = None
    gate = threading.Event()
    monkeypatch.setattr(a.state, "read", lambda: gate.wait(30) and None)
    try:
        await asyncio.wait_for(a.registry.refresh("fr"), 25)
    finally:
        gate.set()
    assert a.names == ["fr"]


async def test_a_request_waits_for_the_adapter_of_a_call(start: Start) -> None:
    """It is answered with it as soon as it is loaded."""
    a, b = await pair(start)
    b.gate = threading.Event()
    await a.registry.register(Adapter("fr", "/fr"))
    synced = asyncio.create_task(b.sync())
    await asked(b)
    held = asyncio.create_task(hold(b))
    await asyncio.sleep(0.05)
    assert not held.done()
    b.gate.set()
    assert await asyncio.wait_for(held, 60) == "/fr"
    await synced


@pytest.mark.parametrize("is_found", [False, True])
async def test_no_adapter_of_the_store_answers_for_one_of_a_call(
    start: Start, is_found: bool
) -> None:
    """503, which a proxy sends to a server that has it; found before the call, or now."""
    a, b = await pair(start)
    looked_up = Found(b)
    hook(b.registry, find=looked_up)
    if is_found:
        await looked_up("fr")
    b.refused.add("/call")
    await a.registry.register(Adapter("fr", "/call"))
    await b.sync()
    with pytest.raises(NotReadyError, match="adapter fr is registered"):
        await hold(b)
    b.refused.clear()
    b.time += reconciler.FIRST_RETRY_SECONDS
    await b.sync()
    assert await hold(b) == "/call"


async def test_a_found_adapter_serves_on_while_a_call_pins_it(start: Start) -> None:
    """The weights are the same."""
    a, b = await pair(start)
    for one in (a, b):
        await Found(one)("fr")
    b.refused.add("/fr")
    await a.registry.update("fr", lambda one: replace(one, pin=True), 5)
    await b.sync()
    assert list(b.shared.missing) == ["fr"]
    assert await hold(b) == "/fr"


async def asked(replica: Replica) -> None:
    """Return once a load has begun."""
    deadline = time.monotonic() + 60
    while not replica.asked:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Found:
    """A store of adapters, which has every name."""

    def __init__(self, replica: Replica) -> None:
        self._registry = replica.registry

    async def __call__(self, name: str) -> bool:
        """Register it, as the look-up of a request does."""
        if name not in self._registry:
            await self._registry.register(
                Adapter(name, f"/{name}", path="/cache", is_from_store=True)
            )
        return True


async def hold(replica: Replica) -> str:
    """Return the source of the adapter that a request for `fr` gets."""
    async with replica.registry.hold("fr") as adapter:
        return adapter.src
