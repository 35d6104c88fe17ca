"""Archives by their names, where the extra that unpacks them may be missing."""

from pathlib import Path

import pytest

from lmi_vllm import extension
from lmi_vllm.errors import DownloadError
from lmi_vllm.sources import archives


@pytest.mark.parametrize(
    ("name", "stem"),
    [("m.tar.gz", "m"), ("m.tgz", "m"), ("M.ZIP", "M"), ("m.mar", "m"), ("m.bin", None)],
)
def test_archive_is_known_by_its_ending(name: str, stem: str | None) -> None:
    """In any case of letters; what is none keeps its name."""
    assert archives.is_archive(name) is (stem is not None)
    assert archives.without_archive_ending(name) == (stem or name)


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken for unpacked."""
    monkeypatch.setattr(extension, "extras", dict)
    (tmp_path / "m.zip").touch()
    with pytest.raises(DownloadError, match=r"^m\.zip needs the extra archives, which is not"):
        archives.unpack(tmp_path / "m.zip", {"SERVING_DOWNLOAD_DIR": str(tmp_path)}, "m.zip")
