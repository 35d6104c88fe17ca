"""LMI's adapter API over HTTP: bodies, codes, order of checks, selection."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp.test_utils import TestClient
from yarl import URL

from lmi_vllm.errors import AdapterCapacityError
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.openai_lane import with_reference
from lmi_vllm.messages import AdapterRef, GeneratedToken, GenerationChunk
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.web.conftest import LORA, call, lora

__all__ = ["lora"]

ALIAS = {"X-Amzn-SageMaker-Adapter-Alias": "French"}


async def register(client: TestClient, name: str, query: str = "") -> tuple[int, Any]:
    """Register an adapter at a source named for it."""
    return await call(client, "POST", f"/adapters?name={name}&src=/a/{name}{query}")


@pytest.mark.parametrize("prefix", ["/adapters", "/models/demo/adapters"])
async def test_adapter_life_has_documented_bodies(lora: TestClient, prefix: str) -> None:
    """Both prefixes answer each call with the body the specification shows."""
    shown = {"name": "fr", "src": "/a/fr", "preload": True, "pin": False}
    assert await call(lora, "POST", f"{prefix}?name=fr&src=/a/fr&x=1") == (
        200,
        {"status": "Adapter fr registered"},
    )
    assert await call(lora, "GET", f"{prefix}/fr") == (200, shown)
    assert await call(lora, "GET", prefix) == (200, {"adapters": [shown]})
    assert await call(lora, "POST", f"{prefix}/fr/UpDate?pin=TRUE") == (
        200,
        {"status": "Adapter fr updated"},
    )
    assert await call(lora, "GET", f"{prefix}/fr") == (200, {**shown, "pin": True})
    assert await call(lora, "DELETE", f"{prefix}/fr") == (
        200,
        {"status": "Adapter fr unregistered"},
    )
    assert await call(lora, "GET", prefix) == (200, {"adapters": []})


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("POST", "/models/other/adapters", 404, "The model other was not found"),
        ("GET", "/models/other/adapters/fr", 404, "The model other was not found"),
        ("POST", "/adapters", 400, "The parameter name is required"),
        ("POST", "/adapters?name=fr", 400, "The parameter src is required"),
        ("POST", "/adapters?name=fr&src=", 400, "The parameter src is required"),
        ("GET", "/adapters/fr", 404, "The adapter fr was not found"),
        ("POST", "/adapters/fr/update", 404, "The adapter fr was not found"),
        ("DELETE", "/adapters/fr", 404, "The adapter fr was not found"),
        ("PUT", "/adapters", 405, "Requested method is not allowed"),
        ("POST", "/adapters/fr", 405, "Requested method is not allowed"),
        ("GET", "/adapters/fr/update", 405, "Requested method is not allowed"),
        ("POST", "/adapters/fr/rename", 404, "Requested resource is not found"),
        ("GET", "/adapters?limit=many", 400, "must be whole numbers"),
        ("POST", "/adapters?name=fr&src=/a/fr&pin=true&preload=false", 424, "impossible to pin"),
    ],
)
async def test_refusal_has_documented_status(
    serve: ServeScripted, method: str, path: str, status: int, text: str
) -> None:
    """Each refusal has its status, its text, and the server-level error shape."""
    answered, body = await call(await serve(LORA), method, path)
    assert answered == status
    assert text in body["message"]
    assert body["code"] == status
    assert body["type"]


async def test_lora_off_is_named_after_the_model(serve: ServeScripted) -> None:
    """Without LoRA every call is 400, but an unknown model is still 404."""
    client = await serve()
    for method, path in (("POST", "/adapters"), ("GET", "/adapters"), ("DELETE", "/adapters/x")):
        status, body = await call(client, method, path)
        assert (status, body["message"]) == (400, "LoRA is not enabled.")
    assert (await call(client, "POST", "/models/other/adapters"))[0] == 404


async def test_duplicate_name_is_refused_before_a_load(
    lora: TestClient, engine: ScriptedEngine
) -> None:
    """A second registration of a name is 409 and leaves the first one's weights alone."""
    await register(lora, "fr")
    loaded = dict(engine.adapters)
    status, body = await call(lora, "POST", "/adapters?name=fr&src=/x&pin=true&preload=false")
    assert status == 409
    assert "fr already exists" in body["message"]
    assert engine.adapters == loaded


async def test_update_refuses_other_source_and_unpin(lora: TestClient) -> None:
    """What cannot be changed is 424 and the entry stays as it was."""
    await register(lora, "fr", "&pin=true")
    before = await call(lora, "GET", "/adapters/fr")
    for query, text in (
        ("pin=false", "Unpinning adapter is not supported"),
        ("src=/b/fr", "Updating adapter path is not supported."),
        ("preload=false", "impossible to pin"),
    ):
        status, body = await call(lora, "POST", f"/adapters/fr/update?{query}")
        assert status == 424
        assert text in body["message"]
    assert await call(lora, "GET", "/adapters/fr") == before


async def test_update_keeps_what_calls_before_it_have_changed(
    lora: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused only for what it asks for: the pin and the source are not its own."""
    await register(lora, "fr")
    may_load, load = asyncio.Event(), ScriptedEngine.load_adapter

    async def load_later(owner: ScriptedEngine, adapter: AdapterRef) -> None:
        await may_load.wait()
        await load(owner, adapter)

    monkeypatch.setattr(ScriptedEngine, "load_adapter", load_later)
    inplace = {"lora_name": "fr", "lora_path": "/b/fr", "load_inplace": True}
    first = (
        call(lora, "POST", "/adapters/fr/update?pin=true"),
        call(lora, "POST", "/v1/load_lora_adapter", json=inplace),
        call(lora, "POST", "/adapters/fr/update?foo=1"),
    )
    calls = []
    for one in first:
        calls.append(asyncio.create_task(one))
        await asyncio.sleep(0.05)  # each waits for the one before it
    may_load.set()
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3
    found = lora.app[SERVICE].runtime.adapters.describe("fr")
    assert (found.src, found.pin, found.options) == ("/b/fr", True, {"foo": "1"})


async def test_alias_is_shown_instead_of_the_name(lora: TestClient) -> None:
    """The alias header decides what messages call the adapter, never which one it is."""
    for method, path, status, text in (
        ("POST", "/adapters?name=fr&src=/a", 200, "Adapter French registered"),
        ("POST", "/adapters?name=fr&src=/a", 409, "The adapter French already exists"),
        ("POST", "/adapters/fr/update", 200, "Adapter French updated"),
        ("DELETE", "/adapters/fr", 200, "Adapter French unregistered"),
        ("DELETE", "/adapters/fr", 404, "The adapter French was not found"),
    ):
        answered, body = await call(lora, method, path, headers=ALIAS)
        assert answered == status
        assert (body.get("status") or body["message"]).startswith(text)


async def test_query_wins_over_body_field_by_field(lora: TestClient) -> None:
    """Arguments come from a JSON body too; what the query says goes before it."""
    body = {"name": "no", "src": "/from/body", "preload": False, "pin": "false"}
    assert (await call(lora, "POST", "/adapters?name=fr", json=body))[0] == 200
    shown = {"name": "fr", "src": "/from/body", "preload": False, "pin": False}
    assert await call(lora, "GET", "/adapters/fr") == (200, shown)


@pytest.mark.parametrize(
    ("query", "body", "named"),
    [
        ("pin=1", None, "pin"),
        ("pin=maybe", None, "pin"),
        ("pin=", None, "pin"),
        ("preload=2", None, "preload"),
        ("preload=no", None, "preload"),
        ("wait=1", None, "wait"),
        ("", {"preload": 1}, "preload"),
        ("", {"pin": ["true"]}, "pin"),
    ],
)
async def test_flag_that_is_neither_true_nor_false_is_refused(
    lora: TestClient, query: str, body: object, named: str
) -> None:
    """On every call that reads it, before anything is done."""
    await register(lora, "fr")
    refusal = f"The parameter {named} must be true or false"
    for path in (f"/adapters?name=de&src=/a/de&{query}", f"/adapters/fr/update?{query}"):
        status, answer = await call(lora, "POST", path, json=body)
        assert (status, answer["message"]) == (400, refusal)
    if named == "wait":
        status, answer = await call(lora, "DELETE", f"/adapters/fr?{query}")
        assert (status, answer["message"]) == (400, refusal)
    _, listed = await call(lora, "GET", "/adapters")
    assert listed["adapters"] == [{"name": "fr", "src": "/a/fr", "preload": True, "pin": False}]


async def test_null_is_a_flag_left_out(lora: TestClient) -> None:
    """As in a body of a client that writes all its fields."""
    body = {"name": "fr", "src": "/a/fr", "preload": None, "pin": None}
    assert (await call(lora, "POST", "/adapters", json=body))[0] == 200
    shown = {"name": "fr", "src": "/a/fr", "preload": True, "pin": False}
    assert await call(lora, "GET", "/adapters/fr") == (200, shown)


async def test_list_is_paged_in_registration_order(lora: TestClient) -> None:
    """Pages follow each other by offset; a limit outside 1..100 means 100, but 0 is refused."""
    names = [f"a{number}" for number in (3, 1, 2, 5, 4)]
    for name in names:
        await register(lora, name)

    async def page(query: str) -> tuple[list[str], str | None]:
        _, body = await call(lora, "GET", f"/adapters?{query}")
        return [item["name"] for item in body["adapters"]], body.get("nextPageToken")

    assert await page("limit=2") == (names[:2], "2")
    assert await page("limit=2&next_page_token=2") == (names[2:4], "4")
    assert await page("limit=2&next_page_token=4") == (names[4:], None)
    assert await page("limit=-1") == (names, None)
    assert await page("limit=101") == (names, None)
    status, body = await call(lora, "GET", "/adapters?limit=0")  # a client would ask for ever
    assert (status, "limit must be at least 1" in body["message"]) == (400, True)


@pytest.mark.parametrize("name", [" a", "a ", "  ", "\ta", "a\u00a0", "\u3000a", "a\n"])
async def test_name_that_a_header_cannot_carry_is_refused(
    lora: TestClient, engine: ScriptedEngine, name: str
) -> None:
    """HTTP strips a header's value: another adapter, or the base model, would answer."""
    await register(lora, "a")
    status, body = await call(lora, "POST", "/adapters", json={"name": name, "src": "/b"})
    assert (status, "begins or ends with white space" in body["message"]) == (400, True)
    for more in ({}, {"load_inplace": True}):
        given = {"lora_name": name, "lora_path": "/b", **more}
        status, body = await call(lora, "POST", "/v1/load_lora_adapter", json=given)
        assert status == 400
        assert "begins or ends with white space" in body["error"]["message"]
    assert set(engine.adapters) == {"a"}


TOO_LARGE = {
    "name": ({"name": "n" * 4097}, "too long for the path"),
    "name-encoded": ({"name": "\U0001f600" * 342}, "too long for the path"),
    "control": ({"name": "a\x00b"}, "control character"),
    "line": ({"name": "a\nb"}, "control character"),
    "source": ({"src": "/" + "s" * 8192}, "src: at most 8192"),
    "others": ({"note": "x" * 65536}, "parameters without an effect"),
}


@pytest.mark.parametrize(("given", "words"), TOO_LARGE.values(), ids=TOO_LARGE)
async def test_call_with_too_much_text_is_refused(
    lora: TestClient, engine: ScriptedEngine, given: dict[str, str], words: str
) -> None:
    """No path could remove it, and it would be listed for every client and kept on disk."""
    sent = {"name": "a", "src": "/b", **given}
    status, body = await call(lora, "POST", "/adapters", json=sent)
    assert (status, words in body["message"], len(body["message"]) < 400) == (400, True, True)
    assert not engine.adapters


BODIES = {
    "many": {f"p{number}": "1" for number in range(1025)},
    "text": {"name": "a", "url": "/" + "s" * 65536, "src": "/" + "s" * 65536},
    "key": {"k" * 65537: "1"},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_call_with_many_or_long_parameters_is_refused(
    lora: TestClient, caplog: pytest.LogCaptureFixture, body: dict[str, str]
) -> None:
    """400,000 names of parameters were as many lines of the log, and held the server for 7 s."""
    for path in ("/adapters", "/models"):
        status, answer = await call(lora, "POST", path, json=body)
        assert (status, len(answer["message"]) < 400) == (400, True)
        assert "at most" in answer["message"]
    assert "has no effect" not in caplog.text


async def test_longest_name_and_parameters_are_taken(lora: TestClient) -> None:
    """At the bounds; an update cannot pass them."""
    name = "\U0001f600" * 341
    sent = {"name": name, "src": "/b", "note": "x" * 65532}
    assert (await call(lora, "POST", "/adapters", json=sent))[0] == 200
    status, _ = await call(lora, "POST", f"/adapters/{quote(name)}/update", json={"more": "x"})
    assert status == 400
    assert (await call(lora, "DELETE", f"/adapters/{quote(name)}"))[0] == 200


async def test_update_serves_files_that_have_changed(
    lora: TestClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """It said "updated" and served the old weights; files that are the same stay loaded."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"1")
    await call(lora, "POST", "/adapters", json={"name": "a", "src": str(tmp_path)})
    first = engine.adapters["a"].engine_id
    update = f"/adapters/a/update?src={tmp_path}&preload=true"
    assert (await call(lora, "POST", update))[0] == 200
    assert engine.adapters["a"].engine_id == first
    for query in ("&pin=false", "&pin=true"):
        weights.write_bytes(b"2")
        assert (await call(lora, "POST", update + query))[0] == 200
        assert engine.adapters["a"].engine_id > first
        first = engine.adapters["a"].engine_id
    assert engine.adapters["a"].pinned


async def test_failed_registration_leaves_nothing(lora: TestClient, engine: ScriptedEngine) -> None:
    """What the engine refuses is 424 with its text, unlisted, and unusable."""
    engine.refused_adapters = {"fr": "LoRA rank 32 is greater than max_lora_rank 16."}
    status, body = await register(lora, "fr")
    assert (status, body["message"]) == (424, "LoRA rank 32 is greater than max_lora_rank 16.")
    assert await call(lora, "GET", "/adapters") == (200, {"adapters": []})
    assert (await call(lora, "POST", "/invocations", json={"inputs": "x", "adapters": "fr"}))[
        0
    ] == 424


async def test_no_slot_is_507_for_registration_and_424_for_a_request(
    lora: TestClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full engine is out of memory for who registers, a failed dependency for who asks."""
    await register(lora, "lazy", "&preload=false")

    async def refuse(_: object, adapter: Any) -> None:
        raise AdapterCapacityError(f"No free lora slots for adapter {adapter.name}")

    monkeypatch.setattr(ScriptedEngine, "load_adapter", refuse)
    status, body = await register(lora, "fr")
    assert (status, body["code"]) == (507, 507)
    payload = {"inputs": "x", "adapters": "lazy"}
    status, body = await call(lora, "POST", "/invocations", json=payload)
    assert status == 424
    assert "No free lora slots for adapter lazy" in body["error"]


async def test_not_preloaded_adapter_is_usable_and_removable(
    lora: TestClient, engine: ScriptedEngine
) -> None:
    """preload=false keeps the weights out until the first request; the flag is shown as asked."""
    await register(lora, "fr", "&preload=false")
    await register(lora, "never", "&preload=false")
    assert engine.adapters == {}
    payload = {"inputs": "x", "adapters": "fr"}
    assert (await call(lora, "POST", "/invocations", json=payload))[0] == 200
    assert engine.jobs[-1].adapter == engine.adapters["fr"]
    assert (await call(lora, "GET", "/adapters/fr"))[1]["preload"] is False
    assert (await call(lora, "POST", "/adapters/fr/update?preload=true"))[0] == 200
    assert (await call(lora, "POST", "/adapters/fr/update?preload=false"))[0] == 200
    assert engine.adapters == {}
    for name in ("fr", "never"):
        assert (await call(lora, "DELETE", f"/adapters/{name}"))[0] == 200


async def test_unregister_waits_only_for_its_own_requests(
    lora: TestClient, engine: ScriptedEngine
) -> None:
    """New requests are refused at once, running ones end, other names go on meanwhile."""
    token = GeneratedToken(1, "x")
    may_end = asyncio.Event()
    engine.script = (may_end, GenerationChunk(0, (token,), "x", "length", prompt_tokens=1))
    await register(lora, "fr")
    payload = {"inputs": "x", "adapters": "fr"}
    running = asyncio.create_task(call(lora, "POST", "/invocations", json=payload))
    while not engine.running_requests:  # noqa: ASYNC110 (a condition of the double)
        await asyncio.sleep(0.01)
    removing = asyncio.create_task(call(lora, "DELETE", "/adapters/fr"))
    while (await call(lora, "GET", "/adapters/fr"))[0] != 404:  # noqa: ASYNC110 (over HTTP)
        await asyncio.sleep(0.01)
    again = asyncio.create_task(register(lora, "fr"))
    assert (await call(lora, "POST", "/invocations", json=payload))[0] == 424
    assert (await register(lora, "other"))[0] == 200
    done, _ = await asyncio.wait({removing, again}, timeout=0.5)
    assert not done
    assert "fr" in engine.adapters
    may_end.set()
    assert (await running)[0] == 200
    assert (await removing)[0] == 200
    assert (await again)[0] == 200


async def test_models_lists_adapters_loaded_or_not(lora: TestClient) -> None:
    """/v1/models has a card per registered adapter."""
    await register(lora, "fr")
    await register(lora, "lazy", "&preload=false")
    _, body = await call(lora, "GET", "/v1/models")
    assert [card["id"] for card in body["data"]][-2:] == ["fr", "lazy"]


def test_models_lists_what_the_user_named() -> None:
    """Not the folder that the engine was given."""
    found = with_reference(b'{"data":[{"id":"lmi","root":"/cache/snapshots/1"}]}', "acme/x-8b")
    assert found == b'{"data":[{"id":"lmi","root":"acme/x-8b"}]}'
    assert with_reference(b"{}", "") == with_reference(b"{}", "acme/x-8b") == b"{}"


async def test_calls_before_the_engine_is_there_are_503(serve: ServeScripted) -> None:
    """Adapter calls wait for the engine, as requests do."""
    response = await (await serve(is_ready=False)).get("/adapters")
    assert (response.status, response.headers["Retry-After"]) == (503, "5")


async def test_sources_are_shown_without_their_secrets(lora: TestClient) -> None:
    """To every caller, and in the refusal of the one who sent them."""
    src = "https%3A%2F%2Fme%3As3cret%40h%2Fa%3FX-Amz-Signature%3Ds3cret"
    assert (await call(lora, "POST", f"/adapters?name=fr&src={src}"))[0] == 200
    answers = [
        await call(lora, "GET", "/adapters"),
        await call(lora, "GET", "/adapters/fr"),
        await call(lora, "GET", "/v1/models"),
        await call(lora, "POST", f"/adapters/{src}/update"),
    ]
    assert "s3cret" not in str(answers)
    assert "https://***@h/a?X-Amz-Signature=***" in str(answers)


@pytest.mark.parametrize("prefix", ["/adapters", "/models/demo/adapters"])
@pytest.mark.parametrize(
    "name",
    ["{json}", "a/b", "50%", "50%25", "a b", "a+b", "ü-é", "a?b#c", "update", "a%2Fb", "..x"],
)
async def test_each_name_that_is_registered_can_be_removed(
    lora: TestClient, name: str, prefix: str
) -> None:
    """The path has it percent-encoded, whatever its characters."""
    path = URL(f"{prefix}/{quote(name, safe='')}", encoded=True)
    registered = await lora.post(prefix, params={"name": name, "src": "/a"})
    assert registered.status == 200
    assert (await (await lora.get(path)).json())["name"] == name
    updated = await lora.post(URL(f"{path}/update?pin=true", encoded=True))
    assert await updated.json() == {"status": f"Adapter {name} updated"}
    answer = await lora.delete(path)
    assert (answer.status, (await answer.json())["status"]) == (
        200,
        f"Adapter {name} unregistered",
    )


async def test_pages_lose_no_row_while_adapters_change(lora: TestClient) -> None:
    """A token is a place that removals do not move; without changes it is the offset, as in LMI."""
    for number in range(7):
        await register(lora, f"a{number}")
    first = await (await lora.get("/adapters?limit=3")).json()
    assert first["nextPageToken"] == "3"
    for name in ("a0", "a2", "a4"):
        assert (await call(lora, "DELETE", f"/adapters/{name}"))[0] == 200
    await register(lora, "new")
    second = await (await lora.get("/adapters?limit=2&next_page_token=3")).json()
    assert [one["name"] for one in second["adapters"]] == ["a3", "a5"]
    token = second["nextPageToken"]
    last = await (await lora.get(f"/adapters?limit=2&next_page_token={token}")).json()
    assert [one["name"] for one in last["adapters"]] == ["a6", "new"]
    assert "nextPageToken" not in last


async def test_a_form_is_named_as_one(lora: TestClient) -> None:
    """`curl -F` sends one; the error was about a digit after a sign."""
    form = aiohttp.FormData({"name": "a"})
    form.add_field("file", b"x", filename="x")
    for data, kind in ((form, "multipart/form-data"), ({"name": "a"}, "x-www-form-urlencoded")):
        answer = await lora.post("/adapters", data=data)
        assert answer.status == 400
        text = await answer.text()
        assert "forms are not read here" in text
        assert kind in text
