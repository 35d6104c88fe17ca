"""Files of weights that are not what their names say are named before the engine starts."""

import json
import os
import shutil
from pathlib import Path

import pytest

from lmi_vllm.checks.model_config import read_directory
from lmi_vllm.checks.safetensors_header import DamagedFileError, read_tensors
from lmi_vllm.checks.weight_files import weight_problems
from lmi_vllm.demo import DEMO_MODEL_DIR

arrays = pytest.importorskip("safetensors.numpy")
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


@pytest.mark.parametrize("name", ["model.safetensors", "more.safetensors"])
def test_named_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    """By the check of the weights, nor by what reads their shapes."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    read_directory(folder)
    assert f"{folder / name} is no regular file" in [*weight_problems(folder)]
    with pytest.raises(DamagedFileError, match="no regular file"):
        read_tensors(folder / name)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_link_to_nothing_is_named(folder: Path, name: str) -> None:
    """Caches that were pruned leave some; the size of the others is that of the model."""
    whole = read_directory(folder).weight_bytes
    (folder / f"model-2{Path(name).suffix}").symlink_to("/nowhere")
    assert read_directory(folder).weight_bytes == whole
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / name).symlink_to("/nowhere")
    assert read_directory(folder).problem == ""
    problems = list(weight_problems(folder))
    assert f"{folder / name} cannot be read: No such file or directory" in problems


def test_missing_shard_is_named(folder: Path) -> None:
    """One that the index names, where others are there."""
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (problem,) = weight_problems(folder)
    assert problem.startswith(str(folder / "model-2.safetensors"))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": null}'])
def test_index_that_is_none_is_named(folder: Path, text: str) -> None:
    """An engine reads it beside a single file, too. It was said that config.json cannot be read."""
    (folder / INDEX).write_text(text, encoding="utf-8")
    (problem,) = weight_problems(folder)
    assert problem.startswith(f"{folder / INDEX} is no index with a weight_map")
    assert read_directory(folder).problem == ""


LAYER = "model.layers.0."


PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.gate_proj")


@pytest.mark.parametrize("lost", PARTS)
def test_lost_part_of_a_layer_is_named(folder: Path, lost: str) -> None:
    """An engine makes one layer of several parts, and serves what was in memory for a lost one."""
    tensors = arrays.load_file(folder / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if name != f"{LAYER}{lost}.weight"}
    assert len(kept) == len(tensors) - 1
    arrays.save_file(kept, folder / "model.safetensors")
    (problem,) = weight_problems(folder)
    assert problem.startswith(f"{folder} lacks {LAYER}{lost}.weight")
    assert "a part of a layer" in problem


@pytest.mark.parametrize("lost", ["self_attn.v_proj", "mlp.gate_proj"])
def test_weight_that_only_the_index_has_is_named(folder: Path, lost: str) -> None:
    """Where no layer has it, it could be of another kind. A tied output is in no file."""
    tensors = arrays.load_file(folder / "model.safetensors")
    names = [*tensors, "lm_head.weight"]
    tensors = {name: one for name, one in tensors.items() if f".{lost}." not in name}
    arrays.save_file(tensors, folder / "model.safetensors")
    assert [*weight_problems(folder)] == []
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    (problem,) = weight_problems(folder)
    assert problem.startswith(f"{folder} lacks {LAYER}{lost}.weight")
    assert "a part of a layer" in problem


@pytest.mark.parametrize(
    "name", ["self_attn.gate_proj", "self_attn.indexer.compressor.gate_proj", "head.k_proj"]
)
def test_part_of_another_kind_of_layer_misses_nothing(folder: Path, name: str) -> None:
    """Attention of AFMoE has a gate, compressors of DeepSeek V4 have one, and a head keys alone."""
    tensors = arrays.load_file(folder / "model.safetensors")
    tensors[f"{LAYER}{name}.weight"] = tensors[f"{LAYER}mlp.gate_proj.weight"]
    arrays.save_file(tensors, folder / "model.safetensors")
    assert [*weight_problems(folder)] == []


@pytest.mark.parametrize(
    ("lost", "other"), [("self_attn.v_proj", "self_attn.q_proj"), ("mlp.gate_proj", "mlp.up_proj")]
)
def test_layer_of_other_shapes_misses_nothing(folder: Path, lost: str, other: str) -> None:
    """In Gemma 4 the layers without values have wider queries; some have an up projection alone."""
    tensors = arrays.load_file(folder / "model.safetensors")
    del tensors[f"{LAYER}{lost}.weight"]
    wide = tensors[f"{LAYER}{other}.weight"]
    tensors[f"{LAYER}{other}.weight"] = wide.repeat(2, 0)
    arrays.save_file(tensors, folder / "model.safetensors")
    assert [*weight_problems(folder)] == []


def test_lost_gate_of_an_expert_is_named(folder: Path) -> None:
    """Experts have their numbers below the layer's."""
    tensors = arrays.load_file(folder / "model.safetensors")
    for part in ("gate_proj", "up_proj", "down_proj"):
        weight = tensors[f"{LAYER}mlp.{part}.weight"]
        for expert in range(3):
            tensors[f"{LAYER}mlp.experts.{expert}.{part}.weight"] = weight.copy()
    del tensors[f"{LAYER}mlp.experts.1.gate_proj.weight"]
    arrays.save_file(tensors, folder / "model.safetensors")
    (problem,) = weight_problems(folder)
    assert problem.startswith(f"{folder} lacks {LAYER}mlp.experts.1.gate_proj.weight")
