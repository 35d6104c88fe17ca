"""Which weights are read, in the order of vLLM's own loader."""

import json
from pathlib import Path

import pytest

from lmi_vllm.features.weights_ahead.files import file_system, weight_files


def made(folder: Path, *names: str) -> Path:
    """Make files of one byte."""
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize(
    ("load_format", "names", "found"),
    [
        ("auto", ["model-10.safetensors", "model-2.safetensors", "pytorch_model.bin"],
         ["model-2.safetensors", "model-10.safetensors"]),
        ("auto", ["model.safetensors", "consolidated.safetensors"], ["consolidated.safetensors"]),
        ("safetensors", ["model.safetensors", "consolidated.safetensors"],
         ["consolidated.safetensors", "model.safetensors"]),
        ("auto", ["pytorch_model.bin", "training_args.bin"], ["pytorch_model.bin"]),
        ("pt", ["a.pt", "optimizer.pt", "model.safetensors"], ["a.pt"]),
        ("safetensors", ["pytorch_model.bin"], []),
        ("dummy", ["model.safetensors"], []),
        ("runai_streamer", ["model.safetensors"], []),
        ("sharded_state", ["model-rank-0-part-0.safetensors"], []),
    ],
)  # fmt: skip
def test_files_of_a_format(
    load_format: str, names: list[str], found: list[str], tmp_path: Path
) -> None:
    """Numbers count as numbers; formats that pass the page cache by have none."""
    assert [path.name for path in weight_files(made(tmp_path, *names), load_format)] == found


def test_index_names_what_is_read(tmp_path: Path) -> None:
    """Repositories have weights twice; an index of other files counts for nothing."""
    folder = made(tmp_path, "model-1.safetensors", "model-2.safetensors", "other.safetensors")
    index = folder / "model.safetensors.index.json"
    for named, count in ((["model-1.safetensors", "model-2.safetensors"], 2), (["gone"], 3)):
        index.write_text(json.dumps({"weight_map": dict(enumerate(named))}), encoding="utf-8")
        assert len(weight_files(folder, "auto")) == count
    index.write_text("[]", encoding="utf-8")
    assert len(weight_files(folder, "auto")) == 3


def test_file_system_of_a_path() -> None:
    """The kernel's own list says it."""
    assert file_system(Path("/proc/self/status")) == "proc"
