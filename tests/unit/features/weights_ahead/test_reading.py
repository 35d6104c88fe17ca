"""Files are read into memory, within bounds; the log says how much."""

import ctypes
import logging
import mmap
import os
import re
from pathlib import Path

import pytest

from lmi_vllm.features.weights_ahead import reading
from lmi_vllm.features.weights_ahead.reading import ReadAhead

MB = 1 << 20
SIZE = 16  # MB of a file: the kernel itself reads some MB ahead


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A look at memory and at the engine after each MB."""
    monkeypatch.setattr(reading, "BLOCK", MB)
    caplog.set_level(logging.INFO)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return three files that are on the disk alone."""
    made = []
    for number in range(3):
        path = tmp_path / f"model-{number}.safetensors"
        with path.open("wb") as file:
            file.write(os.urandom(SIZE * MB))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        made.append(path)
    if any(map(share, made)):
        pytest.skip("this file system keeps files in memory")
    return made


def share(path: Path) -> float:
    """Return the MB of a file that are in memory; asking reads nothing (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    found = (ctypes.c_ubyte * (SIZE * MB // mmap.PAGESIZE))()
    with path.open("rb") as file:
        size, offset = ctypes.c_size_t(SIZE * MB), ctypes.c_long(0)
        place = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), offset)
        here = ctypes.c_void_p(place)
        assert libc.mincore(here, size, found) == 0
        libc.munmap(here, size)
    return sum(page & 1 for page in found) * mmap.PAGESIZE / MB


def free() -> int:
    """Return more than enough memory."""
    return 1 << 40


def test_all_of_it_is_in_memory_then(files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """And one line says what was read; a second time there is nothing to do."""
    ReadAhead(files, lambda _: True, free).run()
    assert [share(path) for path in files] == [SIZE] * 3
    assert re.search(r"weights: read ahead \d+\.\d MB in \d+\.\d s\n", caplog.text)
    caplog.clear()
    again = ReadAhead(files, lambda _: True, free)
    again.run()
    assert (again.count, again.passed) == (0, 3 * SIZE * MB)
    assert "weights: read ahead nothing (they are in memory already)" in caplog.text


def test_what_is_in_memory_is_not_copied(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file in the middle is there already."""
    monkeypatch.setattr(reading, "BLOCK", SIZE * MB)
    files[1].read_bytes()
    copied: list[int] = []
    copy = reading._into_cache

    def into_cache(source: int, buffer: memoryview, start: int, count: int) -> int:
        copied.append(count)
        return copy(source, buffer, start, count)

    monkeypatch.setattr(reading, "_into_cache", into_cache)
    ahead = ReadAhead(files, lambda _: True, free)
    ahead.run()
    assert ahead.passed == 3 * SIZE * MB
    assert copied == [SIZE * MB] * 2
    assert [share(path) for path in files] == [SIZE] * 3


def test_files_that_the_engine_has_read_are_left_out(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The one that it reads is the next one wanted; a file is left in its middle, too."""
    looks: list[int] = []

    def is_wanted(place: int) -> bool:
        looks.append(place)
        return place > 0 and len(looks) < 22

    ReadAhead(files, is_wanted, free).run()
    assert share(files[0]) == 0
    assert share(files[1]) == SIZE
    assert 0 < share(files[2]) < SIZE
    assert "(the engine needs no more)" in caplog.text


def test_half_of_the_memory_is_left_alone(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """At the beginning; without a figure nothing is read."""
    ReadAhead(files, lambda _: True, lambda: 40 * MB).run()
    assert share(files[0]) == SIZE
    assert 0 < share(files[1]) < SIZE
    assert share(files[2]) == 0
    assert "(more would take memory that the start needs)" in caplog.text
    unknown = ReadAhead(files, lambda _: True, lambda: None)
    unknown.run()
    assert unknown.passed == 0


def test_memory_that_others_take_ends_it(files: list[Path]) -> None:
    """Once a quarter of what was free is left."""
    left = iter([*[100 * MB] * 4, *[24 * MB] * 9])
    ahead = ReadAhead(files, lambda _: True, lambda: next(left))
    ahead.run()
    assert ahead.passed == 2 * MB


def test_file_system_that_keeps_nothing_is_read_once(
    files: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says so, or it does not tell and the file system is of an unknown kind."""
    for answer in (False, None):
        caplog.clear()
        monkeypatch.setattr(reading, "_is_kept", lambda *_, answer=answer: answer)
        ahead = ReadAhead(files, lambda _: True, free, is_known_to_keep=False)
        ahead.run()
        assert ahead.passed == MB
        assert "(what was read does not stay in memory)" in caplog.text
    known = ReadAhead(files, lambda _: True, free)
    known.run()
    assert known.passed == 3 * SIZE * MB


def test_first_bytes_may_be_dropped_meanwhile(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large file, where memory is short: only what was read a moment ago tells."""
    monkeypatch.setattr(reading, "_is_there", lambda *_: False)
    monkeypatch.setattr(reading, "_is_kept", lambda _, place=0: place > 0)
    ahead = ReadAhead(files, lambda _: True, free)
    ahead.run()
    assert ahead.passed == 3 * SIZE * MB


def test_file_that_is_gone_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine has an error of its own for it."""
    ReadAhead([tmp_path / "gone"], lambda _: True, free).run()
    assert "weights: read ahead nothing (No such file or directory)" in caplog.text
