"""What the engine's own copy of an adapter may hold: pickles are no larger than they look."""

import copy
import os
import resource
import zipfile
from pathlib import Path

import pytest

from lmi_vllm.checks.base_model import describe_base
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.adapter_files import _copy_file, copy_adapter
from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.features.pickled_adapters import convert_pickle
from tests.support import adapter_files

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

pytestmark = pytest.mark.vllm
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
SIZE = 1 << 30
BASE = describe_base(DEMO_MODEL_DIR, (), 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a good adapter of the embedded model, as a pickle."""
    folder = adapter_files.copy_adapter(tmp_path / "source")
    torch.save(load_file(folder / WEIGHTS), folder / PICKLE)
    (folder / WEIGHTS).unlink()
    return folder


def test_pickle_becomes_safetensors(folder: Path, tmp_path: Path) -> None:
    """With the same tensors."""
    held = torch.load(folder / PICKLE, weights_only=True)
    copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle)
    made = load_file(tmp_path / "copy" / WEIGHTS)
    assert made.keys() == held.keys()
    assert all(bool((made[name] == held[name]).all()) for name in held)
    assert not (tmp_path / "copy" / PICKLE).exists()


def test_view_that_repeats_a_byte_is_refused(folder: Path, tmp_path: Path) -> None:
    """A kilobyte would become as many gigabytes as its author wants."""
    tensors = torch.load(folder / PICKLE, weights_only=True)
    large = {name: torch.zeros(1).expand(1 << 30) for name in tensors}
    torch.save(large, folder / PICKLE)
    with pytest.raises(AdapterRefusedError, match=f"{PICKLE} cannot be read: its tensors have"):
        copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle)


def test_compressed_pickle_is_refused(folder: Path, tmp_path: Path) -> None:
    """Zeros compress a thousandfold."""
    again = folder / "again.zip"
    with zipfile.ZipFile(folder / PICKLE) as old, zipfile.ZipFile(again, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    again.rename(folder / PICKLE)
    with pytest.raises(AdapterRefusedError, match="it is compressed"):
        copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle)


@pytest.mark.parametrize("is_pickle", [False, True])
def test_product_is_compared_with_the_base_s_weights(
    folder: Path, tmp_path: Path, *, is_pickle: bool
) -> None:
    """Also of a pickle, and of files that were changed after the registration."""
    tensors = torch.load(folder / PICKLE, weights_only=True)
    strong = {name: torch.full_like(one, 0.2) for name, one in tensors.items()}
    if is_pickle:
        torch.save(strong, folder / PICKLE)
    else:
        save_file(strong, folder / WEIGHTS)
    with pytest.raises(AdapterRefusedError, match="mean size"):
        copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle)


@pytest.mark.parametrize("bytes_asked", [3 << 30, 1 << 40])
def test_pickle_that_asks_for_memory_is_refused(
    folder: Path, tmp_path: Path, bytes_asked: int
) -> None:
    """Torch's own unpickler lets a pickle call `bytearray`; this process takes no part in it."""
    asked = (
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + bytes_asked.to_bytes(8, "little") + b"\x85R."
    )
    with zipfile.ZipFile(folder / PICKLE, "w") as archive:
        archive.writestr("archive/data.pkl", asked)
        archive.writestr("archive/version", "3\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(AdapterRefusedError, match=f"{PICKLE} cannot be read"):
        copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 20)  # KiB


def test_entries_that_overlap_are_refused(folder: Path, tmp_path: Path) -> None:
    """Many names for the same bytes would be as many copies of them."""
    with zipfile.ZipFile(folder / PICKLE, "w") as archive:
        archive.writestr("archive/data/0", bytes(1 << 20))
        for number in range(1, 4):
            again = copy.copy(archive.infolist()[0])
            again.filename = again.orig_filename = f"archive/data/{number}"
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
    with pytest.raises(AdapterRefusedError, match="its entries are larger than the file"):
        copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle)


def test_damaged_archive_is_refused(folder: Path, tmp_path: Path) -> None:
    """Its end looks like an archive's, and the table of entries is not where that says."""
    end = b"PK\x05\x06" + bytes(8) + (999).to_bytes(4, "little") + bytes(6)
    (folder / PICKLE).write_bytes(b"x" * 64 + end)
    with pytest.raises(AdapterRefusedError, match=f"{PICKLE} cannot be read"):
        copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle)


def test_files_that_were_replaced_since_the_check_are_bounded(folder: Path, tmp_path: Path) -> None:
    """Neither a file that grew nor a pipe without a writer holds up the engine."""
    size = sum(file.stat().st_size for file in folder.iterdir())
    with pytest.raises(AdapterRefusedError, match="LMI_ADAPTER_MAX_SIZE"):
        copy_adapter(folder, tmp_path / "copy", BASE, size - 1, convert_pickle)
    copied = sum(file.stat().st_size for file in (tmp_path / "copy").iterdir())
    assert copied < size
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(AdapterRefusedError, match="no regular file"):
        _copy_file(pipe, tmp_path / "read", SIZE)


def test_files_below_a_root_are_looked_at_again_when_they_are_open(tmp_path: Path) -> None:
    """Between the check and the copy a folder or a file can be replaced by a link."""
    root = tmp_path / "root"
    folder = adapter_files.copy_adapter(root / "a")
    outside = adapter_files.copy_adapter(tmp_path / "outside")
    copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle, [root])
    copy_adapter(
        outside, tmp_path / "other", BASE, SIZE, convert_pickle, [root]
    )  # fetched, or of the model
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(outside / WEIGHTS)
    with pytest.raises(AdapterRefusedError, match="leads out of the folders of LMI_ADAPTER_ROOTS"):
        copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle, [root])
    folder.rename(root / "b")
    folder.symlink_to(outside)
    with pytest.raises(AdapterRefusedError, match="leads out of the folders of LMI_ADAPTER_ROOTS"):
        copy_adapter(folder, tmp_path / "copy", BASE, SIZE, convert_pickle, [root])
