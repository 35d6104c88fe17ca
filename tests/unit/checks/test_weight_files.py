"""Files of weights that are not what their names say are named before the engine starts."""

import json
import shutil
from pathlib import Path

import pytest

from lmi_vllm.checks.weight_files import weight_problems
from lmi_vllm.demo import DEMO_MODEL_DIR

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    copied = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, copied)
    return copied


def test_whole_weights_have_no_problem(folder: Path) -> None:
    """Of the embedded model, and of a pickle beside a file that is none."""
    assert [*weight_problems(folder)] == []
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    (folder / "vocabulary.bin").write_bytes(b"")
    assert [*weight_problems(folder)] == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", POINTER, "is a pointer of git-lfs"),
        ("model.safetensors", b"", "is empty"),
        ("model.safetensors", None, "is cut"),
        ("model.safetensors", bytes(5000), "has no header of safetensors"),
        ("model.safetensors", b"\xff" * 9, "has no header of safetensors"),
        ("pytorch_model.bin", POINTER, "is a pointer of git-lfs"),
        ("pytorch_model.bin", bytes(900), "is no file that torch.save wrote"),
        ("pytorch_model.bin", b"PK\x03\x04" + bytes(900), "is cut"),
    ],
)
def test_unusable_file_is_named(folder: Path, name: str, content: bytes | None, said: str) -> None:
    """With its path, and what it is instead."""
    path = folder / name
    if path.suffix == ".bin":
        (folder / "model.safetensors").unlink()
    if content is None:
        content = path.read_bytes()[:-1]
    path.write_bytes(content)
    (problem,) = weight_problems(folder)
    assert problem.startswith(f"{path} {said}")


def test_directory_is_named(folder: Path) -> None:
    """As a mount of a missing file makes one."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    (problem,) = weight_problems(folder)
    assert "is a directory" in problem


def test_missing_shard_is_named(folder: Path) -> None:
    """One that the index names, where others are there."""
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (problem,) = weight_problems(folder)
    assert problem.startswith(str(folder / "model-2.safetensors"))
