"""Adapters that something finds, and replicas that share them, by the calls of the adapter API."""

from aiohttp.test_utils import TestClient

from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.web.request import SERVICE
from tests.support.adapter_hooks import hook
from tests.support.other_replicas import Others
from tests.web.conftest import call, lora
from tests.web.test_found_adapters import check_registers_over, finder_of

__all__ = ["lora"]


async def test_store_adapter_is_listed_as_from_store(lora: TestClient) -> None:
    """Those that calls register look as ever."""
    finder_of(lora)
    await call(lora, "POST", "/invocations", json={"inputs": "x", "adapters": "fr"})
    await call(lora, "POST", "/adapters?name=de&src=/de")
    (found, own) = (await call(lora, "GET", "/adapters"))[1]["adapters"]
    assert found == {
        "name": "fr",
        "src": "s3://x/fr/",
        "preload": True,
        "pin": False,
        "from_store": True,
    }
    assert own == {"name": "de", "src": "/de", "preload": True, "pin": False}


async def test_registration_replaces_a_store_adapter(
    lora: TestClient, engine: ScriptedEngine
) -> None:
    """And not over another call's: that is a conflict."""
    await check_registers_over(lora, engine, "/adapters?name=fr&src=/own", None)


async def test_calls_wait_for_replicas_where_they_ask_for_it(lora: TestClient) -> None:
    """`wait` is no option of the adapter; a replica that lacks the change is named, with 202."""
    others = Others()
    hook(lora.app[SERVICE].runtime.adapters, sharing=others)
    for method, path in (
        ("POST", "/adapters?name=fr&src=/fr"),
        ("POST", "/adapters?name=de&src=/de&wait=true"),
        ("POST", "/adapters/de/update?preload=false&wait=true"),
        ("DELETE", "/adapters/de?wait=true"),
    ):
        assert (await call(lora, method, path))[0] == 200
    assert others.heard == [
        ("refresh", "fr"),
        ("changed", "fr"),
        *(("refresh", "de"), ("changed", "de"), ("confirm", "de")) * 3,
    ]
    assert not lora.app[SERVICE].runtime.adapters.describe("fr").options
    for method, path, done in (
        ("POST", "/adapters?name=slow&src=/s&wait=true", "registered"),
        ("POST", "/adapters/slow/update?wait=true", "updated"),
        ("DELETE", "/adapters/slow?wait=true", "unregistered"),
    ):
        assert await call(lora, method, path) == (
            202,
            {"status": f"Adapter slow {done}", "unconfirmed": {"b": "has not read the change"}},
        )
