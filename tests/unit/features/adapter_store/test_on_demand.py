"""Adapters on demand: what is fetched when, what is kept, and what calls have to say about it."""

import asyncio
import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.engine.base import ActiveAdapters
from lmi_vllm.errors import EngineDeadError, NotReadyError, RequestError, UnknownAdapterError
from lmi_vllm.features.adapter_store import negative_cache, on_demand, stores
from lmi_vllm.features.adapter_store.negative_cache import (
    ABSENT_SECONDS,
    UNREACHABLE_SECONDS,
    NegativeCache,
)
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.sources.table import Sources
from tests.support.adapter_files import CAPITALS, CONFIG, WEIGHTS, copy_adapter
from tests.support.hub_server import Repository, hub_server
from tests.support.s3_server import Refusal
from tests.unit.features.adapter_store.conftest import FILES, PLACE, REFRESH, SIZE, Bench

AWAY = Refusal(503, "SlowDown")
Weights = Callable[[int], bytes]


async def use(bench: Bench, name: str) -> int:
    """Use the adapter as a request does; returns the engine's id of the load."""
    async with bench.registry.hold(name) as adapter:
        assert adapter.ref is not None
        return adapter.ref.engine_id


async def test_concurrent_requests_for_one_adapter_share_one_fetch(bench: Bench) -> None:
    """Requests that come together wait for one fetch; the next one asks the store nothing."""
    bench.put("fr")
    bench.open()
    ids = await asyncio.gather(*(use(bench, "fr") for _ in range(20)))
    assert len(set(ids)) == 1
    assert sorted(bench.s3.objects_sent) == sorted(f"adapters/fr/{name}" for name in FILES)
    before = bench.calls
    assert before <= 2 * len(FILES) + 2  # one look-up, one fetch
    assert await use(bench, "fr") == ids[0]
    assert bench.calls == before
    assert [(one.name, one.is_from_store, one.src) for one in bench.registry] == [
        ("fr", True, f"{PLACE}fr/")
    ]


async def test_request_that_leaves_does_not_end_the_fetch(bench: Bench) -> None:
    """Others wait for the same one."""
    bench.put("fr")
    bench.open()
    first = asyncio.create_task(use(bench, "fr"))
    await asyncio.sleep(0)
    second = asyncio.create_task(use(bench, "fr"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second


async def test_missing_name_costs_one_call_and_is_asked_again_later(bench: Bench) -> None:
    """An invented name cannot have the store asked at will; one that comes later is found."""
    bench.open()
    for _ in range(5):
        with pytest.raises(UnknownAdapterError):
            await use(bench, "fr")
    assert bench.calls == 1
    bench.put("fr")
    bench.time += ABSENT_SECONDS + 1
    assert await use(bench, "fr")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "-a", ".a", "a b", "é", "x" * 129, "a\n", "lmi"]
)
async def test_names_that_are_no_folder_never_reach_the_store(bench: Bench, name: str) -> None:
    """One path component of a few characters, and no name of the base model."""
    bench.open()
    with pytest.raises(UnknownAdapterError):
        await use(bench, name)
    assert bench.calls == 0


async def test_lookups_that_wait_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that invent names and disconnect leave neither tasks nor calls behind without end."""
    monkeypatch.setattr(on_demand, "MAX_WAITING", 10)
    bench.open()
    clients = [asyncio.create_task(use(bench, f"invented{n}")) for n in range(100)]
    for _ in range(3):
        await asyncio.sleep(0)
    for client in clients:
        client.cancel()
    ends = await asyncio.gather(*clients, return_exceptions=True)
    assert sum(isinstance(end, NotReadyError) for end in ends) == 90
    assert bench.calls <= 10
    deadline = time.monotonic() + 60
    while True:  # what was looked up has made room
        try:
            await use(bench, "fr")
        except NotReadyError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        except UnknownAdapterError:
            break


def test_memory_of_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten; what a call removed is not pushed out by invented names."""
    monkeypatch.setattr(negative_cache, "MAX_NAMES", 10)
    absences = NegativeCache(lambda: 0.0)
    absences.remove("gone")
    for number in range(1000):
        absences.miss(f"n{number}")
    assert len(absences) == 11
    assert absences.is_absent("gone")
    assert absences.is_absent("n999")
    assert not absences.is_absent("n0")


async def test_damaged_adapter_is_refused_and_not_fetched_again(bench: Bench) -> None:
    """It is checked as every adapter; only another version is worth a fetch."""
    bench.put("fr", **{"adapter_model.safetensors": b"damaged"})
    bench.open()
    with pytest.raises(RequestError, match=r"^fr.*adapter_model.safetensors"):
        await use(bench, "fr")
    fetched = len(bench.s3.objects_sent)
    bench.time += ABSENT_SECONDS + 1
    with pytest.raises(RequestError, match=r"adapter_model\.safetensors"):
        await use(bench, "fr")
    assert len(bench.s3.objects_sent) == fetched
    bench.put("fr")
    bench.time += ABSENT_SECONDS + 1
    assert await use(bench, "fr")


async def test_code_of_a_fetched_adapter_is_refused(bench: Bench) -> None:
    """LMI_CUSTOM_CODE rules as for any adapter that was fetched."""
    bench.put("fr", **{"model.py": b"raise SystemExit"})
    bench.open()
    with pytest.raises(RequestError, match="LMI_CUSTOM_CODE=all"):
        await use(bench, "fr")


async def test_adapter_above_the_size_limit_is_not_fetched_and_evicts_none(bench: Bench) -> None:
    """Its size is known from the listing."""
    bench.put("small")
    bench.put("large", **{WEIGHTS: bytes(2 * SIZE)})
    bench.open(max_bytes=2 * SIZE)
    await use(bench, "small")
    with pytest.raises(RequestError, match=r"option\.adapter_store_cache_gb"):
        await use(bench, "large")
    assert f"adapters/large/{WEIGHTS}" not in bench.s3.objects_sent
    assert "small" in bench.registry


async def test_least_recently_used_makes_room(bench: Bench) -> None:
    """It is unregistered, unloaded and deleted; what was used since stays."""
    bench.put("a", "b", "c")
    bench.open(max_bytes=2 * SIZE)
    for name in ("a", "b", "a", "c"):
        await use(bench, name)
    assert sorted(bench.engine.adapters) == ["a", "c"]
    assert sorted({path.name[0] for path in bench.files.folder.iterdir()}) == ["a", "c"]
    assert await use(bench, "b")
    assert sorted(bench.engine.adapters) == ["b", "c"]


async def test_adapters_that_push_each_other_out_are_never_unknown(bench: Bench) -> None:
    """A cache that is too small is 503 at worst: to the client the adapter is there."""
    names = ["a", "b", "c", "d"]
    bench.put(*names)
    bench.open(max_bytes=SIZE)
    uses = (use(bench, name) for name in 5 * names)
    ends = await asyncio.gather(*uses, return_exceptions=True)
    assert {type(end) for end in ends} <= {int, NotReadyError}
    assert int in {type(end) for end in ends}


async def test_adapter_that_was_pushed_out_meanwhile_is_not_absent(bench: Bench) -> None:
    """Between its registration and the end of the look-up that brought it."""
    bench.put("fr")
    found = bench.open()
    finding = asyncio.create_task(found.find("fr"))
    while "fr" not in bench.registry:  # noqa: ASYNC110 (the task above registers it)
        await asyncio.sleep(0)
    await bench.registry.unregister("fr", 1, only_from_store=True)
    assert await finding is True
    assert "fr" not in bench.registry


async def test_adapter_in_use_or_pinned_is_never_moved_out(bench: Bench) -> None:
    """Another goes, or the request that needs the room is refused, for now."""
    bench.put("a", "b", "c")
    bench.open(max_bytes=2 * SIZE)
    async with bench.registry.hold("a"):
        await use(bench, "b")
        await use(bench, "c")
        assert sorted(bench.engine.adapters) == ["a", "c"]
        await bench.registry.update("c", lambda one: replace(one, pin=True), 5)
        with pytest.raises(NotReadyError, match="is in use"):
            await use(bench, "b")
    assert await use(bench, "b")
    assert sorted(bench.engine.adapters) == ["b", "c"]


async def test_adapter_in_use_by_another_process_is_never_moved_out(bench: Bench) -> None:
    """Only the engine knows of its requests: those that run, and those that wait for a slot."""
    bench.put("a", "b", "c", "d")
    bench.open(max_bytes=3 * SIZE)
    for name in ("a", "b", "c"):
        await use(bench, name)
    bench.engine.active_adapters = ActiveAdapters(1, ("a",), ("b",))
    await use(bench, "d")
    assert sorted(bench.engine.adapters) == ["a", "b", "d"]


async def test_changed_adapter_is_reloaded_and_running_requests_keep_theirs(
    bench: Bench, other_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is asked once the time is over, by a request, and not before."""
    monkeypatch.setattr(on_demand, "RENEW_WAIT_SECONDS", 60.0)  # a busy machine is slow to renew
    bench.put("fr")
    bench.open()
    old = await use(bench, "fr")
    bench.put("fr", **{"adapter_model.safetensors": other_weights(1)})
    assert await use(bench, "fr") == old
    bench.time += REFRESH
    async with bench.registry.hold("fr") as first:
        # It waited for the new one, a request that has held the old one would go on with it.
        new = first.ref.engine_id if first.ref else 0
        assert new > old
    assert await use(bench, "fr") == new
    assert bench.loads("fr") == new
    assert len([path for path in bench.files.folder.iterdir() if path.is_dir()]) == 1


async def test_request_on_the_old_load_keeps_it_until_its_end(
    bench: Bench, other_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine drops the old load after that."""
    dropped: list[int] = []
    unload = ScriptedEngine.unload_adapter

    async def noted(engine: ScriptedEngine, ref: object) -> None:
        dropped.append(ref.engine_id)  # type: ignore[attr-defined]
        await unload(engine, ref)  # type: ignore[arg-type]

    monkeypatch.setattr(ScriptedEngine, "unload_adapter", noted)
    bench.put("fr")
    bench.open()
    async with bench.registry.hold("fr") as running:
        assert running.ref is not None
        bench.put("fr", **{"adapter_model.safetensors": other_weights(1)})
        bench.time += REFRESH
        while await use(bench, "fr") == running.ref.engine_id:  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # a busy machine is slow to renew
        assert dropped == []
    while not dropped:  # noqa: ASYNC110 (the renewal goes on by itself)
        await asyncio.sleep(0.005)
    assert dropped == [running.ref.engine_id]


async def test_new_version_stays_where_the_engine_dies_with_the_old_one(
    bench: Bench, other_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are what the registry gives the next engine."""

    async def dead(_engine: ScriptedEngine, _ref: object) -> None:
        raise EngineDeadError

    monkeypatch.setattr(on_demand, "RENEW_WAIT_SECONDS", 60.0)  # a busy machine is slow to renew
    bench.put("fr")
    bench.open()
    old = await use(bench, "fr")
    bench.put("fr", **{"adapter_model.safetensors": other_weights(1)})
    bench.time += REFRESH
    with monkeypatch.context() as patched:
        patched.setattr(ScriptedEngine, "unload_adapter", dead)
        assert await use(bench, "fr") > old
    path = Path(bench.registry.describe("fr").path)
    assert (path / WEIGHTS).read_bytes() == other_weights(1)


async def test_unchanged_adapter_is_compared_once_in_each_period(bench: Bench) -> None:
    """One listing, nothing fetched; an adapter that is not used costs no call at all."""
    bench.put("fr")
    bench.open()
    load, before = await use(bench, "fr"), bench.calls
    for period in (1, 2, 3):
        bench.time += REFRESH
        for _ in range(5):
            assert await use(bench, "fr") == load
        assert bench.calls == before + period


async def test_damaged_update_keeps_the_old_adapter_and_is_fetched_once(bench: Bench) -> None:
    """A version that was refused is negative_cache."""
    bench.put("fr")
    bench.open()
    load = await use(bench, "fr")
    bench.put("fr", **{"adapter_model.safetensors": b"damaged"})
    bench.time += REFRESH
    assert await use(bench, "fr") == load
    fetched = len(bench.s3.objects_sent)
    bench.time += REFRESH
    assert await use(bench, "fr") == load
    assert len(bench.s3.objects_sent) == fetched


async def test_adapter_missing_in_the_store_is_unloaded(bench: Bench) -> None:
    """Its files, too."""
    bench.put("fr")
    bench.open()
    await use(bench, "fr")
    for name in FILES:
        bench.s3.delete(f"adapters/fr/{name}")
    bench.time += REFRESH
    with pytest.raises(UnknownAdapterError):
        await use(bench, "fr")
    assert bench.engine.adapters == {}
    assert not [*bench.files.folder.iterdir()]


async def test_store_that_is_away_is_not_asked_by_every_request(bench: Bench) -> None:
    """A new name is 503 and asked again in seconds; what is loaded goes on."""
    bench.put("fr", "de")
    bench.open()
    load = await use(bench, "fr")
    bench.s3.refusal = AWAY
    bench.time += REFRESH
    assert await use(bench, "fr") == load
    with pytest.raises(NotReadyError, match="de cannot be had"):
        await use(bench, "de")
    before = bench.calls
    with pytest.raises(NotReadyError):
        await use(bench, "de")
    assert bench.calls == before
    bench.s3.refusal = None
    bench.time += UNREACHABLE_SECONDS + 1
    assert await use(bench, "de")


@pytest.mark.parametrize(
    "refusal", [Refusal(403, "AccessDenied"), Refusal(404, "NoSuchBucket")], ids=["403", "404"]
)
async def test_store_that_refuses_unloads_nothing(bench: Bench, refusal: Refusal) -> None:
    """Missing rights, or a bucket that is gone: not a name that is, and not a client's retry."""
    bench.put("fr", "de")
    bench.open()
    loaded = await use(bench, "fr")
    bench.s3.refusal = refusal
    bench.time += REFRESH
    for _ in range(2):
        assert await use(bench, "fr") == loaded
        with pytest.raises(RequestError, match="de cannot be had"):
            await use(bench, "de")
    bench.s3.refusal = None
    bench.time += ABSENT_SECONDS
    assert await use(bench, "de")
    assert await use(bench, "fr") == loaded


async def test_fetch_that_breaks_is_503_and_leaves_nothing(bench: Bench) -> None:
    """The next request after a few seconds begins again."""
    bench.put("fr")
    bench.open()
    bench.s3.refuse_objects = AWAY
    with pytest.raises(NotReadyError):
        await use(bench, "fr")
    assert not [*bench.files.folder.iterdir()]
    bench.s3.refuse_objects = None
    bench.time += UNREACHABLE_SECONDS + 1
    assert await use(bench, "fr")


async def test_adapter_that_changes_while_it_is_fetched_is_fetched_again(
    bench: Bench, other_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of one version are never kept, and found after a restart, as those of another."""
    bench.put("fr")
    bench.open()
    changed = other_weights(1)
    fetch_model = Sources.fetch_model

    def change_and_fetch(*words: Any, **options: Any) -> Path:
        bench.put("fr", **{WEIGHTS: changed})
        return fetch_model(*words, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Sources, "fetch_model", change_and_fetch)
        with pytest.raises(NotReadyError):
            await use(bench, "fr")
    assert not [*bench.files.folder.iterdir()]
    bench.time += UNREACHABLE_SECONDS + 1
    await use(bench, "fr")
    (folder,) = bench.files.folder.glob("fr@*[0-9a-f]")
    assert (folder / WEIGHTS).read_bytes() == changed


async def test_registered_adapter_wins_over_the_store(bench: Bench, tmp_path: Path) -> None:
    """Also one that is registered after the store's was loaded; the store leaves it alone."""
    bench.put("fr", "de")
    bench.open()
    own = copy_adapter(tmp_path / "own")
    await bench.registry.register(Adapter("fr", str(own)))
    await use(bench, "fr")
    assert bench.calls == 0
    found = await use(bench, "de")
    await bench.registry.replace(Adapter("de", str(own)), 5)
    bench.time += REFRESH
    before = bench.calls
    assert await use(bench, "de") > found
    assert bench.calls == before
    assert bench.registry.describe("de").src == str(own)


async def test_removed_adapter_stays_away(bench: Bench, tmp_path: Path) -> None:
    """A call has removed what the store still has: until a call registers the name."""
    bench.put("fr")
    bench.open()
    await use(bench, "fr")
    await bench.registry.unregister("fr", 5)
    bench.time += 10 * ABSENT_SECONDS
    with pytest.raises(UnknownAdapterError):
        await use(bench, "fr")
    assert not [*bench.files.folder.iterdir()]
    await bench.registry.register(Adapter("fr", str(copy_adapter(tmp_path / "own"))))
    assert await use(bench, "fr")


async def test_files_survive_a_restart_and_are_locked_by_one_process(bench: Bench) -> None:
    """The next one fetches nothing; one beside it has a folder of its own."""
    bench.put("fr")
    bench.open()
    await use(bench, "fr")
    first = bench.files.folder
    other = Bench(bench.files.folder.parents[3].parent, bench.s3)
    other.environ = bench.environ
    other.open()
    assert other.files.folder != first
    other.close()
    bench.close()
    sent = len(bench.s3.objects_sent)
    other.open()
    assert other.files.folder == first
    await use(other, "fr")
    assert len(bench.s3.objects_sent) == sent
    other.close()


async def test_restart_knows_which_adapter_was_used_last(bench: Bench) -> None:
    """By use, not by fetch; use is noted as often as the store is asked for changes."""
    bench.put("a", "b")
    bench.open()
    await use(bench, "a")
    await use(bench, "b")
    for name in ("a", "b"):
        os.utime(next(bench.files.folder.glob(f"{name}@*")), (1.0, 1.0))
    bench.time += REFRESH
    await use(bench, "a")
    bench.files.scan()
    assert [key[0] for key in bench.files] == ["b", "a"]


async def test_restarted_engine_loads_store_adapters_on_next_use(bench: Bench) -> None:
    """Hundreds of them would keep the base model waiting."""
    bench.put("fr")
    bench.open()
    old = await use(bench, "fr")
    engine = ScriptedEngine()
    await bench.registry.move_to(engine)
    assert engine.adapters == {}
    assert await use(bench, "fr") > old
    assert list(engine.adapters) == ["fr"]


async def test_local_folder_is_a_store(bench: Bench, tmp_path: Path) -> None:
    """Its adapters are used where they are, and renewed when a file changes."""
    copy_adapter(tmp_path / "store" / "fr")
    bench.open(str(tmp_path / "store"))
    load = await use(bench, "fr")
    assert bench.registry.describe("fr").path == str(tmp_path / "store" / "fr")
    copy_adapter(tmp_path / "store" / "fr", lora_alpha=1)
    bench.time += REFRESH
    assert await use(bench, "fr") > load
    with pytest.raises(UnknownAdapterError):
        await use(bench, "de")
    assert (tmp_path / "store" / "fr").is_dir()


@pytest.mark.parametrize("call", ["look_up", "fetch"])
async def test_unreadable_store_folder_is_not_retried_by_each_request(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A share that is stale for a moment is 503, as any store that is away."""
    copy_adapter(tmp_path / "store" / "fr")
    bench.open(str(tmp_path / "store"))
    calls: list[object] = []

    def fail(*words: object) -> None:
        calls.append(words)
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(stores.LocalFolders, call, fail)
        for _ in range(3):
            with pytest.raises(NotReadyError, match="fr cannot be had"):
                await use(bench, "fr")
    assert len(calls) == 1
    bench.time += UNREACHABLE_SECONDS + 1
    assert await use(bench, "fr")


async def test_hub_owner_is_a_store(bench: Bench, tmp_path: Path) -> None:
    """Its repositories are fetched as plain files; one that is not there is unknown."""
    files = {file.name: file.read_bytes() for file in CAPITALS.iterdir() if file.is_file()}
    with hub_server(acme__fr=Repository(files)) as hub:
        bench.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        bench.open("hf://acme/")
        assert await use(bench, "fr")
        assert bench.registry.describe("fr").src == "acme/fr"
        with pytest.raises(UnknownAdapterError):
            await use(bench, "de")


async def test_refused_token_unloads_nothing(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The adapter is not gone: it is served on, and the log says what the hub refuses."""
    with hub_server(acme__fr=(repository := Repository(FILES))) as hub:
        bench.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        bench.open("hf://acme/")
        load = await use(bench, "fr")
        repository.is_gated, repository.token = True, "another"
        bench.time += REFRESH
        assert await use(bench, "fr") == load
        assert (
            "adapter fr cannot be fetched from the store: hub model acme/fr is gated" in caplog.text
        )
        repository.is_gated, repository.token = False, None
        bench.time += REFRESH
        assert await use(bench, "fr") == load


@pytest.mark.parametrize(
    ("refusal", "token", "is_gone"),
    [
        ((404, {}), "", True),
        ((410, {}), "", True),
        ((404, {"X-Error-Code": "RepoNotFound"}), "hf_t", True),
        ((401, {"X-Error-Code": "RepoNotFound"}), "", True),  # what the hub says without a token
        ((401, {"X-Error-Message": "Invalid username or password."}), "", True),
        ((401, {"X-Error-Message": "Invalid username or password."}), "hf_expired", False),
        ((401, {"X-Error-Code": "RepoNotFound"}), "hf_expired", False),
        ((401, {}), "", False),  # of a mirror or a proxy
        ((402, {}), "", False),
        ((403, {}), "", False),
        ((407, {}), "", False),
        ((451, {}), "", False),
    ],
)
async def test_only_the_hubs_not_found_unloads(
    bench: Bench,
    tmp_path: Path,
    refusal: tuple[int, dict[str, str]],
    token: str,
    is_gone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any other refusal is of the token, the account or a proxy: what is loaded is served on."""
    monkeypatch.setattr(on_demand, "RENEW_WAIT_SECONDS", 60.0)  # a busy machine is slow to renew
    with hub_server(acme__fr=Repository(FILES)) as hub:
        bench.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        bench.environ["HF_TOKEN"] = token
        bench.open("hf://acme/")
        load = await use(bench, "fr")
        hub.refusal = refusal
        bench.time += REFRESH
        if is_gone:
            with pytest.raises(UnknownAdapterError):
                await use(bench, "fr")
        else:
            assert await use(bench, "fr") == load


async def test_hub_adapter_is_fetched_at_the_commit_that_was_looked_up(
    bench: Bench, other_weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push between the two is another version: it comes with the next comparison."""
    monkeypatch.setattr(on_demand, "RENEW_WAIT_SECONDS", 60.0)  # a busy machine is slow to renew
    fetch_model, changed = Sources.fetch_model, other_weights(1)

    def weights() -> bytes:
        return (Path(bench.registry.describe("fr").path) / WEIGHTS).read_bytes()

    with hub_server(acme__fr=(repository := Repository(FILES))) as hub:
        bench.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        bench.open("hf://acme/")

        def push_and_fetch(*words: Any, **options: Any) -> Path:
            repository.push("2" * 40, FILES | {WEIGHTS: changed})
            return fetch_model(*words, **options)

        with monkeypatch.context() as patched:
            patched.setattr(Sources, "fetch_model", push_and_fetch)
            load = await use(bench, "fr")
        assert weights() == FILES[WEIGHTS]
        bench.time += REFRESH
        assert await use(bench, "fr") > load
        assert weights() == changed


async def test_states_of_a_training_are_not_fetched(bench: Bench) -> None:
    """They do not count as the adapter's size, and a change of theirs is none of the adapter."""
    bench.put("fr", **{"optimizer.pt": bytes(4 * SIZE)})
    bench.open(max_bytes=2 * SIZE)
    await use(bench, "fr")
    bench.put("fr", **{"optimizer.pt": bytes(5 * SIZE)})
    loaded = bench.loads("fr")
    bench.time += REFRESH
    await use(bench, "fr")
    assert bench.loads("fr") == loaded
    assert "adapters/fr/optimizer.pt" not in bench.s3.objects_sent


async def test_adapter_without_weights_is_refused_by_its_reason(bench: Bench) -> None:
    """Someone uploads it; the store itself has not failed."""
    bench.s3.put({f"adapters/fr/{CONFIG}": b"{}"})
    bench.open()
    with pytest.raises(RequestError, match="its weights are missing"):
        await use(bench, "fr")
    assert not bench.s3.objects_sent
