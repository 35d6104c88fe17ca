"""A pickle of an adapter gives its tensors and nothing else: code in it is refused, and never run.

Seen red with `weights_only=False` in the child: the folder that the code makes was there.
"""

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmi_vllm.features.pickled_adapters.convert import convert

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch reads pickles")


class Code:
    """What runs when it is unpickled: it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trace),)


def as_archive(path: Path, content: bytes) -> None:
    """Write what torch.save writes since its release 1.6."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")


def as_plain_pickle(path: Path, content: bytes) -> None:
    """Write a bare pickle, as older files begin."""
    path.write_bytes(content)


def test_tensors_become_safetensors(tmp_path: Path) -> None:
    """Also views of one storage, which safetensors refuses to write as they are."""
    import torch  # noqa: PLC0415 (slow)
    from safetensors.torch import load_file  # noqa: PLC0415 (imports torch)

    whole = torch.arange(6.0)
    torch.save({"a": whole, "b": whole[2:4]}, tmp_path / "adapter_model.bin")
    assert convert(tmp_path / "adapter_model.bin", tmp_path / "made") == ""
    made = load_file(tmp_path / "made")
    assert {name: tensor.tolist() for name, tensor in made.items()} == {
        "a": [0, 1, 2, 3, 4, 5],
        "b": [2, 3],
    }


@pytest.mark.parametrize("write", [as_archive, as_plain_pickle])
def test_code_is_refused_and_never_run(
    write: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    """In the place of a tensor; the reason names what it asked for, without advice to run it."""
    trace, source = tmp_path / "ran", tmp_path / "adapter_model.bin"
    content = pickle.dumps({"a": Code(trace)}, protocol=2)
    write(source, content)
    reason = convert(source, tmp_path / "made")
    assert not trace.exists()
    assert (
        reason == f"cannot be read: it holds more than tensors: GLOBAL {os.mkdir.__module__}.mkdir"
    )
    assert not (tmp_path / "made").exists()
    pickle.loads(content)
    assert trace.exists()  # what it would have done


def test_pickle_without_tensors_is_refused(tmp_path: Path) -> None:
    """A reason for the client, not a trace."""
    (tmp_path / "adapter_model.bin").write_bytes(b"no pickle")
    reason = convert(tmp_path / "adapter_model.bin", tmp_path / "made")
    assert reason.startswith("cannot be read: ")
    assert not (tmp_path / "made").exists()


def test_the_list_of_entries_is_read_in_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may consist of entries: the server would hold gigabytes of them, and stand still."""
    as_archive(tmp_path / "adapter_model.bin", b"")

    def read_here(*_: object) -> None:
        pytest.fail("the server reads the archive itself")

    monkeypatch.setattr(zipfile, "ZipFile", read_here)
    monkeypatch.setattr(zipfile, "is_zipfile", read_here)
    assert convert(tmp_path / "adapter_model.bin", tmp_path / "made").startswith("cannot be read:")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """torch.save compresses nothing."""
    source = tmp_path / "adapter_model.bin"
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 10_000)
    assert convert(source, tmp_path / "made") == (
        "cannot be read: it is compressed, which torch.save never does"
    )


def test_a_long_list_of_entries_is_refused(tmp_path: Path) -> None:
    """Its last record says how long the list is, which is read at once."""
    source, size = tmp_path / "adapter_model.bin", (4 << 20) + 1
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, size, 0, 0)
    source.write_bytes(b"\0" * size + end)
    assert convert(source, tmp_path / "made") == (
        f"cannot be read: its list of entries has more than {4 << 20} bytes"
    )
