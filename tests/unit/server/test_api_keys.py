"""The keys that open a server: never an open one where a key was meant."""

from pathlib import Path

import pytest

from lmi_vllm.errors import StartupError
from lmi_vllm.server.listeners import api_keys


def test_every_place_of_a_key_counts(tmp_path: Path) -> None:
    """Also the name that `vllm serve` reads, and each line of a file."""
    file = tmp_path / "keys"
    file.write_text("third\n\n fourth \n")
    environ = {"LMI_API_KEY": "first", "VLLM_API_KEY": "second", "LMI_API_KEY_FILE": str(file)}
    assert api_keys(environ) == ("first", "second", "third", "fourth")
    assert api_keys({"LMI_API_KEY": "", "VLLM_API_KEY": ""}) == ()


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff"])
def test_file_without_a_key_ends_the_start(tmp_path: Path, content: bytes | None) -> None:
    """Missing, empty or unreadable as text."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match="LMI_API_KEY_FILE"):
        api_keys({"LMI_API_KEY_FILE": str(file)})
