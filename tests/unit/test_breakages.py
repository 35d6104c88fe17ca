"""The twenty breakages of tests/README.md can still be made: what they change is there, once."""

import pytest

from tests.breakages import BREAKAGES, ROOT, Breakage, place


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_breakage_finds_its_place(breakage: Breakage) -> None:
    """`python -m tests.breakages` makes them and says which test noticed."""
    assert place(breakage, ROOT / "lmi_vllm").is_file()
    assert breakage.new != breakage.old
    assert all((ROOT / path).exists() for path in breakage.tests.split())


def test_there_are_twenty() -> None:
    """Ten of the product, ten of SECURITY.md's table."""
    assert [breakage.name.startswith("security") for breakage in BREAKAGES] == [
        *[False] * 10, *[True] * 10,
    ]  # fmt: skip
