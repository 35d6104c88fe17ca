"""Inputs that once crashed a parser; each stays refused, or read, as it should be."""

import base64

import pytest

from tests.fuzz.targets import TARGETS

FOUND = {
    "gzip header cut off": ("archive", b"\x01\x1f\x8b\x08"),
    "gzip header cut off in its flags": ("archive", b"\x01\x1f\x8b\x08\x04"),
    "empty archive": ("archive", b"\x01"),
    "zip whose bzip2 is none": (
        "archive",
        base64.b64decode(
            "AFBLAwQUAAAACAA6P3Vdj10OXgYAAABkAAAABwAAAGEvYi50eHSrqHcAAABQSwECFAMUAAAADAA6P3Vdj10OovoA"
            "BQBkAAAABwAAAAAAAAAAAAAALwEAAAAAYS9iLnR4dFBLBQYAAAAAAQEAADUAAAArAAAAdwA="
        ),
    ),
}


@pytest.mark.parametrize(("name", "data"), FOUND.values(), ids=FOUND)
def test_found_by_fuzzing(name: str, data: bytes) -> None:
    """It is an error of ours, or none."""
    TARGETS[name](data)
