"""What `make test` leaves out exists, and what is to hold its promise is not left out itself."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import file_seconds
from tests.support.long_tests import LONG, PROOFS, SLOW, is_left_out, is_long, is_slow

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"(?:tests|integration)/[\w/]+(?:\.py)?")


@pytest.mark.parametrize("test", LONG)
def test_long_tests_exist(test: str) -> None:
    """A file, or a test that its file defines."""
    file, _, name = test.partition("::")
    assert (ROOT / file).is_file()
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("test", LONG)
def test_another_test_holds_the_promise(test: str) -> None:
    """The places that are named exist, and at least one of them is part of `make test`."""
    places = PLACE.findall(LONG[test])
    assert all((ROOT / place).exists() for place in places), places
    assert not places or not all(map(is_left_out, places))


def test_parameters_do_not_hide_a_long_test() -> None:
    """An id names its file, its test and its parameters; any part of it may be long."""
    one = next(test for test in LONG if "::" in test and "[" not in test)
    row = next(test for test in LONG if "[" in test)
    file = next(test for test in LONG if "::" not in test)
    assert is_long(f"{one}[a::b]")
    assert is_long(row)
    assert not is_long(row.replace("[", "[another-"))
    assert is_long(f"{file}::test_any[a]")
    assert not is_long(one.replace("::test_", "::test_another_"))


def test_tests_named_in_security_run_in_make_test() -> None:
    """Each row of the table of promises names a test that is not left out."""
    promises, _, _ = (ROOT / "SECURITY.md").read_text().partition("## How it works")
    rows = [line for line in promises.splitlines() if line[:2] == "| "]
    proofs = [PLACE.findall(row.rsplit("|", 2)[1]) for row in rows[1:]]
    assert proofs
    assert [found for found in proofs if all(map(is_left_out, found))] == []


@pytest.mark.parametrize("place", SLOW)
def test_tests_left_out_of_make_unit_exist(place: str) -> None:
    """A file, or a folder with its last slash."""
    assert (ROOT / place).is_dir() if place.endswith("/") else (ROOT / place).is_file()


@pytest.mark.parametrize("proof", PROOFS)
def test_make_test_runs_the_proofs_among_the_slow(proof: str) -> None:
    """The Makefile names each, and `make unit` leaves it out."""
    assert proof in (ROOT / "Makefile").read_text()
    assert is_slow(proof)


def test_longest_files_are_first() -> None:
    """Tests of one file keep their order; a new file is neither first nor last."""
    files = [*file_seconds.read()]
    ids = [f"{file}::{name}" for file in (files[-1], "new.py", files[0]) for name in "ba"]
    items: list[Any] = [SimpleNamespace(nodeid=test) for test in ids]
    file_seconds.sort_longest_first(items)
    assert [item.nodeid for item in items] == [*ids[4:], *ids[2:4], *ids[:2]]


def test_files_whose_length_is_known_exist() -> None:
    """The table was not written before one was renamed."""
    assert [file for file in file_seconds.read() if not (ROOT / file).is_file()] == []
