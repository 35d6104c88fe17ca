"""Archives by their names, where the feature that unpacks them may be missing."""

import pytest

from lmi_vllm.sources import archives


@pytest.mark.parametrize(
    ("name", "stem"),
    [("m.tar.gz", "m"), ("m.tgz", "m"), ("M.ZIP", "M"), ("m.mar", "m"), ("m.bin", None)],
)
def test_archive_is_known_by_its_ending(name: str, stem: str | None) -> None:
    """In any case of letters; what is none keeps its name."""
    assert archives.is_archive(name) is (stem is not None)
    assert archives.without_archive_ending(name) == (stem or name)
