"""vLLM's two adapter routes over HTTP: its bodies and codes, over LMI's registry."""

import asyncio

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.support.adapter_hooks import hook
from tests.support.other_replicas import Others
from tests.web.conftest import LORA, call
from tests.web.test_found_adapters import check_registers_over, finder_of


async def test_vllm_routes_have_vllm_texts(serve: ServeScripted, engine: ScriptedEngine) -> None:
    """The two routes of vLLM answer in vLLM's words over the same registry."""
    lora = await serve(LORA)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "fr", "lora_path": "/a/fr"}
    assert await call(lora, "POST", load, json=body) == (
        200,
        "Success: LoRA adapter 'fr' added successfully.",
    )
    assert (await call(lora, "GET", "/adapters/fr"))[0] == 200
    status, document = await call(lora, "POST", load, json=body)
    assert status == 400
    assert document["error"]["type"] == "InvalidUserInput"
    assert "has already been loaded" in document["error"]["message"]
    first = engine.adapters["fr"]
    assert (await call(lora, "POST", load, json={**body, "load_inplace": True}))[0] == 200
    assert engine.adapters["fr"].engine_id != first.engine_id
    assert await call(lora, "POST", unload, json={"lora_name": "fr"}) == (
        200,
        "Success: LoRA adapter 'fr' removed successfully.",
    )
    status, document = await call(lora, "POST", unload, json={"lora_name": "fr"})
    assert (status, document["error"]["type"]) == (404, "NotFoundError")
    for wrong in ({}, {"lora_name": "fr"}, {"lora_name": "lmi", "lora_path": "/a"}):
        assert (await call(lora, "POST", load, json=wrong))[0] == 400


@pytest.mark.parametrize("value", ["true", "TRUE", "1", "yes", 1, 1.0])
async def test_load_in_place_is_read_as_by_vllm(serve: ServeScripted, value: object) -> None:
    """Pydantic's booleans: text and numbers count, too."""
    lora = await serve(LORA)
    body = {"lora_name": "fr", "lora_path": "/a/fr"}
    assert (await call(lora, "POST", "/v1/load_lora_adapter", json=body))[0] == 200
    body = {**body, "load_inplace": value}
    assert (await call(lora, "POST", "/v1/load_lora_adapter", json=body))[0] == 200


@pytest.mark.parametrize("value", ["x", "", 2, None, [True], {}], ids=str)
async def test_load_in_place_that_is_no_boolean_is_refused(
    serve: ServeScripted, value: object
) -> None:
    """Also for a name that is new, where it would have no effect."""
    lora = await serve(LORA)
    body = {"lora_name": "fr", "lora_path": "/a/fr", "load_inplace": value}
    status, answer = await call(lora, "POST", "/v1/load_lora_adapter", json=body)
    assert status == 400
    assert "load_inplace: Input should be a valid boolean" in answer["error"]["message"]
    assert await call(lora, "GET", "/adapters") == (200, {"adapters": []})


async def test_load_in_place_keeps_pin_and_options(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """The call names neither; only the weights are others."""
    lora = await serve(LORA)
    assert (await call(lora, "POST", "/adapters?name=fr&src=/a/fr&pin=true&x=1"))[0] == 200
    body = {"lora_name": "fr", "lora_path": "/b/fr", "load_inplace": True}
    assert (await call(lora, "POST", "/v1/load_lora_adapter", json=body))[0] == 200
    shown = {"name": "fr", "src": "/b/fr", "preload": True, "pin": True}
    assert await call(lora, "GET", "/adapters/fr") == (200, shown)
    assert (engine.adapters["fr"].path, engine.adapters["fr"].pinned) == ("/b/fr", True)
    assert lora.app[SERVICE].runtime.adapters.describe("fr").options == {"x": "1"}


async def test_loads_in_place_of_a_new_name_follow_each_other(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """Each is decided when its turn comes: the later ones replace the first."""
    lora = await serve(LORA)
    bodies = [{"lora_name": "fr", "lora_path": f"/{i}/fr", "load_inplace": True} for i in range(3)]
    calls = [call(lora, "POST", "/v1/load_lora_adapter", json=body) for body in bodies]
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3
    assert list(engine.adapters) == ["fr"]


async def test_registration_replaces_a_store_adapter(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """As LMI's own call does."""
    body = {"lora_name": "fr", "lora_path": "/own"}
    await check_registers_over(await serve(LORA), engine, "/v1/load_lora_adapter", body)


async def test_calls_read_changes_of_other_replicas(serve: ServeScripted) -> None:
    """Before they decide whether the name is there."""
    lora = await serve(LORA)
    others = Others()
    hook(lora.app[SERVICE].runtime.adapters, sharing=others)
    for call_, body in (
        ("load", {"lora_name": "fr", "lora_path": "/a/fr"}),
        ("unload", {"lora_name": "fr"}),
    ):
        assert (await call(lora, "POST", f"/v1/{call_}_lora_adapter", json=body))[0] == 200
    assert others.heard == [("refresh", "fr"), ("changed", "fr")] * 2


async def test_adapter_found_by_another_replica_is_unloaded(serve: ServeScripted) -> None:
    """Any of them takes the call: this one finds it first."""
    lora = await serve(LORA)
    finder_of(lora)
    others = Others()
    hook(lora.app[SERVICE].runtime.adapters, sharing=others)
    answer = await call(lora, "POST", "/v1/unload_lora_adapter", json={"lora_name": "fr"})
    assert answer == (200, "Success: LoRA adapter 'fr' removed successfully.")
    assert others.heard[-1] == ("changed", "fr")


async def test_controller_that_calls_each_replica_meets_no_error(serve: ServeScripted) -> None:
    """The second replica has the adapter by the first one's call, and lost it by its next call."""
    lora = await serve(LORA)
    registry = lora.app[SERVICE].runtime.adapters
    others = Others()
    hook(registry, sharing=others)
    await registry.register(Adapter("fr", "/a/fr"))  # as the reconciler does
    first = registry.describe("fr").ref
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    for path in ("/a/fr", "/a/fr/"):
        answer = await call(lora, "POST", load, json={"lora_name": "fr", "lora_path": path})
        assert answer == (200, "Success: LoRA adapter 'fr' added successfully.")
    assert registry.describe("fr").ref == first
    status, document = await call(
        lora, "POST", load, json={"lora_name": "fr", "lora_path": "/b/fr"}
    )
    assert (status, "already been loaded" in document["error"]["message"]) == (400, True)
    await registry.unregister("fr", 1.0)
    assert (await call(lora, "POST", unload, json={"lora_name": "fr"}))[0] == 404
    others.removed.add("fr")
    answer = await call(lora, "POST", unload, json={"lora_name": "fr"})
    assert answer == (200, "Success: LoRA adapter 'fr' removed successfully.")


async def test_adapter_that_comes_while_a_call_waits_is_no_conflict(serve: ServeScripted) -> None:
    """Both replicas get the call at once: here the other one's change is applied first."""
    lora = await serve(LORA)
    registry = lora.app[SERVICE].runtime.adapters
    hook(registry, sharing=Others())
    body = {"lora_name": "fr", "lora_path": "/a/fr"}
    calls = [call(lora, "POST", "/v1/load_lora_adapter", json=body) for _ in range(3)]
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3
