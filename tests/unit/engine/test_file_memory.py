"""What a CPU worker takes for free memory in a container: files that the kernel would drop."""

from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.engine.vllm.cpu import file_memory
from lmi_vllm.engine.vllm.cpu.file_memory import kv_cache_bytes, share_of_container, step_bytes
from lmi_vllm.host_memory import GroupMemory

REFUSAL = "Available memory on node 0 (0.1/1.0 GiB) on kv cache allocation is less than requested"


@pytest.fixture(autouse=True)
def rss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has 200 bytes."""
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=200))
    monkeypatch.setattr(file_memory.psutil, "Process", lambda: process)


def in_container(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    """Have 1,000 bytes at most, of which so many are free; None: no limit."""
    container = None if free is None else GroupMemory(1000, free)
    monkeypatch.setattr(file_memory, "container_memory", lambda: container)


@pytest.mark.parametrize(
    ("free", "given", "seen"),
    [(600, None, 600), (599, None, None), (None, None, None), (600, 5, 5)],
)
def test_worker_begins_if_its_share_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int | None, given: int | None, seen: int | None
) -> None:
    """Otherwise vLLM compares, and refuses in its own words; the field is as before then."""
    in_container(monkeypatch, free)
    config = SimpleNamespace(kv_cache_memory_bytes=given, gpu_memory_utilization=0.6)
    with share_of_container(config):
        assert config.kv_cache_memory_bytes == seen
    assert config.kv_cache_memory_bytes == given
    with pytest.raises(OSError, match="of the body"), share_of_container(config):
        raise OSError("of the body")
    assert config.kv_cache_memory_bytes == given


FREE = "Without files in memory 0.50 of 1.00 GiB are free in this container."


def test_refusal_says_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own figure files in memory are used."""
    container = GroupMemory(1 << 30, 1 << 29)
    monkeypatch.setattr(file_memory, "container_memory", lambda: container)
    config = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.6)
    with pytest.raises(ValueError, match=r"^Available .* GiB are free"), share_of_container(config):
        raise ValueError(REFUSAL)
    with pytest.raises(ValueError, match=r"^another$"), share_of_container(config):
        raise ValueError("another")
    with pytest.raises(ValueError, match="requested") as refusal:
        kv_cache_bytes(refused(REFUSAL), 1 << 30, 0)
    assert str(refusal.value) == f"{REFUSAL} {FREE}"


def refused(text: str) -> Any:
    """Return vLLM's way to the size, which ends with this error."""

    def determine() -> int:
        raise ValueError(text)

    return determine


@pytest.mark.parametrize(
    ("given", "share", "size"), [(500, 0, 500), (None, 700, 500)], ids=["given", "of a share"]
)
def test_size_that_has_room_without_files(
    monkeypatch: pytest.MonkeyPatch, given: int | None, share: int, size: int
) -> None:
    """A share is that of the whole worker."""
    in_container(monkeypatch, 500)
    assert kv_cache_bytes(refused(REFUSAL), given, share) == size
    assert kv_cache_bytes(lambda: 7, given, share) == 7


@pytest.mark.parametrize(
    ("free", "given", "share", "text"),
    [
        (None, 500, 0, REFUSAL),  # no container
        (499, 500, 0, REFUSAL),  # no room
        (499, None, 700, REFUSAL),
        (999, None, 200, REFUSAL),  # the model takes all of the share
        (999, 500, 0, "another error"),
    ],
)
def test_refusals_that_stay(
    monkeypatch: pytest.MonkeyPatch, free: int | None, given: int | None, share: int, text: str
) -> None:
    """In vLLM's words."""
    in_container(monkeypatch, free)
    with pytest.raises(ValueError, match=text[:12]):
        kv_cache_bytes(refused(text), given, share)


@pytest.mark.parametrize("in_group", [True, False])
def test_size_that_the_server_has_chosen_becomes_smaller(
    in_group: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights and other processes have taken memory since; the operator has not asked for it."""
    in_container(monkeypatch, 300 if in_group else None)
    monkeypatch.setattr(file_memory, "free_host_memory", lambda: 300)
    monkeypatch.setattr(file_memory, "is_cache_chosen", lambda: True)
    assert kv_cache_bytes(refused(REFUSAL), 500, 0) == 150
    assert "a part of what is free" in caplog.text
    assert kv_cache_bytes(refused(REFUSAL), 500, 0, ranks=3) == 50
    monkeypatch.setattr(file_memory, "free_host_memory", lambda: 0)
    with pytest.raises(ValueError, match="Available memory"):
        kv_cache_bytes(refused(REFUSAL), 500, 0)


@pytest.mark.parametrize("is_refused", [True, False], ids=["vLLM refuses", "vLLM agrees"])
@pytest.mark.parametrize(
    ("wanted", "ranks", "step", "size"),
    [
        (290, 1, 0, 150),  # a larger container has no larger part
        (150, 1, 0, 150),
        (60, 2, 0, 60),
        (90, 2, 0, 75),
        (290, 1, 100, 100),
        (290, 1, 200, 75),  # a quarter
        (290, 2, 1000, 37),
    ],
)
def test_size_that_the_server_has_chosen_leaves_half_of_what_is_free(
    is_refused: bool, wanted: int, ranks: int, step: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request takes more than nothing, and so does each large step."""
    in_container(monkeypatch, 300)
    monkeypatch.setattr(file_memory, "free_host_memory", lambda: 300)
    monkeypatch.setattr(file_memory, "is_cache_chosen", lambda: True)
    determine = refused(REFUSAL) if is_refused else lambda: wanted
    assert kv_cache_bytes(determine, wanted, 0, ranks, step) == size


def test_size_that_was_given_takes_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's word counts, where vLLM agrees and where only files are in its way."""
    in_container(monkeypatch, 300)
    monkeypatch.setattr(file_memory, "free_host_memory", lambda: 300)
    assert kv_cache_bytes(refused(REFUSAL), 290, 0, 1, 200) == 290
    assert kv_cache_bytes(lambda: 290, 290, 0, 1, 200) == 290


@pytest.mark.parametrize(
    ("text", "numbers"),
    [({"hidden_size": 4, "intermediate_size": 10}, 10), ({"hidden_size": 4}, 4), ({}, 0),
     ({"hidden_size": 4, "intermediate_size": [9, 9]}, 4)],
)  # fmt: skip
def test_step_takes_some_rows_of_the_widest_layer(text: dict[str, Any], numbers: int) -> None:
    """For each token that it may have; ranks share a layer."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**text), dtype=SimpleNamespace(itemsize=2)
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
    )
    assert step_bytes(config) == 100 * (numbers // 2) * 2 * 7
