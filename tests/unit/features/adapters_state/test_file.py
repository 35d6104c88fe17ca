"""The file that keeps adapters over a restart."""

import json
import logging
from pathlib import Path

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.hooks import AdapterHooks
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import AdapterRefusedError, ModelSourceError, ResourceNotFoundError
from lmi_vllm.features.adapters_state.file import AdapterStateFile, read_state, write_state
from lmi_vllm.features.scripted.engine import ScriptedEngine


def resolve(src: str) -> str:
    """Resolve every source but one."""
    if src == "/gone":
        raise AdapterRefusedError("/gone is not a valid path")
    return src


async def started(path: Path) -> AdapterRegistry:
    """Return a registry restored from the file, which it keeps from then on."""
    memory = AdapterStateFile(path)
    registry = AdapterRegistry(
        ScriptedEngine(),
        resolve,
        is_enabled=True,
        hooks=lambda _: AdapterHooks(on_change=memory.keep, forget=memory.forget),
    )
    await registry.register(Adapter("local", "/model/adapters/local", is_local=True))
    await memory.restore(registry)
    return registry


async def test_api_adapters_come_back_with_their_flags(tmp_path: Path) -> None:
    """Registered over the API: restored with flags and options; local ones are not written."""
    path = tmp_path / "deep" / "state.json"
    registry = await started(path)
    given = Adapter("fr", "/a", pin=True, options={"x": "1"})
    await registry.register(given)
    await registry.register(Adapter("lazy", "/b", preload=False))
    await registry.unregister("local", 1)
    again = await started(path)
    assert [item.name for item in again] == ["local", "fr", "lazy"]
    fr = again.describe("fr")
    assert (fr.src, fr.pin, dict(fr.options)) == ("/a", True, {"x": "1"})
    assert again.describe("lazy").ref is None
    await again.unregister("fr", 1)
    assert [kept.name for kept in read_state(path)] == ["lazy"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


async def test_broken_entry_is_named_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An adapter that is unreachable today is not forgotten for tomorrow."""
    path = tmp_path / "state.json"
    write_state(path, [Adapter("bad", "/gone"), Adapter("good", "/a")])
    with caplog.at_level(logging.ERROR):
        registry = await started(path)
    assert "adapter bad could NOT be restored" in caplog.text
    assert [item.name for item in registry] == ["local", "good"]
    await registry.register(Adapter("more", "/b"))
    assert [kept.name for kept in read_state(path)] == ["good", "more", "bad"]
    await registry.register(Adapter("bad", "/c"))
    assert {kept.name: kept.src for kept in read_state(path)}["bad"] == "/c"


async def test_entry_that_cannot_be_restored_is_removed_by_a_call(tmp_path: Path) -> None:
    """Its source is gone for good: no start looks for it again. Another name is unknown."""
    path = tmp_path / "state.json"
    write_state(path, [Adapter("bad", "/gone"), Adapter("good", "/a")])
    registry = await started(path)
    await registry.remove("bad", 1)
    assert [kept.name for kept in read_state(path)] == ["good"]
    with pytest.raises(ResourceNotFoundError):
        await registry.remove("bad", 1)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2, "adapters": []}', '{"version": 1}'])
def test_unreadable_file_stops_the_start(tmp_path: Path, text: str) -> None:
    """The next change would write over what could not be read."""
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(ModelSourceError, match=r"adapters_state .*state.json cannot be read"):
        read_state(path)


def test_disk_that_refuses_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Adapters go on working when the file cannot be written; the log says so."""
    (tmp_path / "file").write_text("")
    write_state(tmp_path / "file" / "state.json", [])
    assert "cannot be written" in caplog.text


def test_file_is_json_for_people(tmp_path: Path) -> None:
    """The file can be read and repaired by hand."""
    write_state(tmp_path / "s.json", [Adapter("a", "/a")])
    assert json.loads((tmp_path / "s.json").read_text())["adapters"][0]["name"] == "a"
