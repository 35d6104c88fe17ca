"""Why a worker refuses an adapter is a kind beside its words, and the status follows the kind."""

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.engine.vllm import adapters
from lmi_vllm.engine.vllm.adapters import EngineAdapters
from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter, WorkerRefusalError
from lmi_vllm.engine.vllm.workarounds.ignored_modules import AdapterInspection
from lmi_vllm.errors import AdapterCapacityError, AdapterRefusedError
from lmi_vllm.features.pickled_adapters import convert_pickle
from lmi_vllm.messages import AdapterRef
from lmi_vllm.private_folders import new_private_folder

SAID = {
    "No free lora slots": "full",
    "CUDA out of memory. Tried": "full",
    "LoRA 7 is not registered": "evicted",
    "rank 64 is too large": "other",
}


class Worker(AdapterInspection):
    """VLLM's worker, which refuses."""

    def __init__(self, said: str) -> None:
        self.said = said

    def pin_lora(self, _: int) -> None:
        """Refuse as vLLM does."""
        raise ValueError(self.said)


@pytest.mark.parametrize(("said", "kind"), SAID.items())
def test_a_worker_names_the_kind_of_its_refusal(said: str, kind: str) -> None:
    """Where vLLM's words are known; the executor carries both as plain texts."""
    assert Worker(said).lmi_pin_adapter(7) == (kind, said)


class Calls:
    """The calls of an engine whose workers refuse."""

    is_dead = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def add_adapter(self, _: LoadedAdapter) -> None:
        """Refuse; the words are those of another kind."""
        words = "No free lora slots" if self.kind == "other" else "too much"
        raise WorkerRefusalError(self.kind, words)

    async def remove_adapter(self, _: int) -> None:
        """Forget it."""


@pytest.mark.parametrize(
    ("kind", "expected"), [("full", AdapterCapacityError), ("other", AdapterRefusedError)]
)
async def test_status_of_a_refusal_follows_its_kind(
    tmp_path: Path, kind: str, expected: type[AdapterRefusedError]
) -> None:
    """507 for lack of room, 424 otherwise, whatever the words are."""
    calls: Any = Calls(kind)
    adapter = LoadedAdapter(7, "a@7", str(tmp_path / "copy"), "a")
    with pytest.raises(AdapterRefusedError) as refused:
        await EngineAdapters(calls, convert_pickle).add(adapter, "/store/a")
    assert type(refused.value) is expected


async def test_a_copy_that_hangs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not answer would keep every later adapter waiting."""
    come_back = threading.Event()
    monkeypatch.setattr(adapters, "COPY_SECONDS", 0.05)
    monkeypatch.setattr(adapters, "copy_adapter", lambda *_: come_back.wait(60))
    calls: Any = Calls("other")
    with new_private_folder("lmi-vllm-test-") as folder:
        load = EngineAdapters(calls, convert_pickle, 1, folder).load(
            AdapterRef("a", "/store/a", 7, pinned=False)
        )
        try:
            with pytest.raises(AdapterRefusedError, match=r"a cannot be read: .* within 0.05 s"):
                await asyncio.wait_for(load, 5)
        finally:
            come_back.set()


async def test_a_full_disk_of_the_server_is_no_fault_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """507 and the place, as for other lack of room; the adapter itself can be read."""

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapters, "copy_adapter", fill)
    calls: Any = Calls("other")
    with new_private_folder("lmi-vllm-test-") as folder:
        load = EngineAdapters(calls, convert_pickle, 1, folder).load(
            AdapterRef("a", "/store/a", 7, pinned=False)
        )
        with pytest.raises(AdapterCapacityError, match=f"no room .* at {folder.path} .TMPDIR"):
            await load
        assert [path.name for path in folder.path.iterdir()] == [".lock"]
