"""Which files are weights, and which folders have none: refused before vLLM is imported."""

from pathlib import Path

import pytest

from lmi_vllm.checks.weight_formats import lack_of_weights, needs_weights
from lmi_vllm.messages import EngineArguments, ModelArtifacts, Origin, OriginKind

CONFIG = ("config.json", "tokenizer.json")


def lack(folder: Path, files: tuple[str, ...], model: str = "", **values: object) -> str:
    """Return the error of a folder with these files."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")
    origin = Origin(OriginKind.HUB, "HF_MODEL_ID")
    arguments = EngineArguments({"model": str(folder), **values}, {"model": origin})
    reference = model or str(folder)
    return lack_of_weights(ModelArtifacts("m", reference, str(folder), directory=folder), arguments)


@pytest.mark.parametrize(
    ("files", "load_format", "looked_for"),
    [
        (CONFIG, None, "auto (*.safetensors, *.bin, consolidated*.safetensors, *.pt)"),
        (("params.json", "tekken.json"), "mistral", "mistral (consolidated*.safetensors)"),
        ((*CONFIG, "model.safetensors"), "pt", "pt (*.pt)"),
        ((*CONFIG, "model.safetensors"), "npcache", "npcache (*.bin)"),
        ((*CONFIG, "pytorch_model.bin"), "safetensors", "safetensors (*.safetensors, "),
        ((*CONFIG, "model.bin"), "RUNAI_streamer", "runai_streamer (*.safetensors)"),
        ((*CONFIG, "training_args.bin", "optimizer.pt"), "auto", "auto ("),
        ((*CONFIG, ".cache/model.safetensors", "onnx/model.bin"), "auto", "auto ("),
        (CONFIG, "bitsandbytes", "bitsandbytes ("),
        (CONFIG, "sharded_state", "sharded_state ("),
    ],
)
def test_folder_without_weights_is_refused(
    tmp_path: Path, files: tuple[str, ...], load_format: str | None, looked_for: str
) -> None:
    """By the option, the folder, what the format reads, and what is there."""
    said = lack(tmp_path, files, load_format=load_format)
    assert f"model (HF_MODEL_ID): {tmp_path} has no weights" in said
    assert f"load_format={looked_for}" in said
    assert f"it holds {', '.join(sorted(files))}. Name" in said


@pytest.mark.parametrize(
    ("files", "values"),
    [
        ((*CONFIG, "model.safetensors"), {}),
        ((*CONFIG, "pytorch_model.bin"), {"load_format": "auto"}),
        ((*CONFIG, "model.pt"), {"load_format": "hf"}),
        (("params.json", "consolidated.safetensors"), {"load_format": "mistral"}),
        (("params.json", "consolidated.00.safetensors"), {"load_format": "safetensors"}),
        ((*CONFIG, "model.bin"), {"load_format": "npcache"}),
        ((*CONFIG, "model.gguf"), {"load_format": "gguf"}),
        ((*CONFIG, "model-rank-0-part-0.safetensors"), {"load_format": "sharded_state"}),
        ((*CONFIG, "transformer/model.safetensors"), {}),
        ((*CONFIG, "0_Transformer/pytorch_model.bin"), {}),
        ((*CONFIG, "adapter_config.json", "adapter_model.safetensors"), {}),
        ((*CONFIG, "model.py"), {}),
        (("adapter_config.json",), {}),
        ((), {}),
        (CONFIG, {"load_format": "dummy"}),
        (CONFIG, {"load_format": "tensorizer"}),
        (CONFIG, {"load_format": "my_loader"}),
        (CONFIG, {"load_format": "modelexpress"}),
        (CONFIG, {"load_format": "runai_streamer", "model_weights": "s3://b/m/"}),
        (CONFIG, {"load_format": "sharded_state",
                  "model_loader_extra_config": {"pattern": "part-{rank}.x"}}),
    ],
)  # fmt: skip
def test_what_may_be_loaded_is_not_refused(
    tmp_path: Path, files: tuple[str, ...], values: dict[str, object]
) -> None:
    """Files of the format at any place, code, and formats whose files are elsewhere or unknown."""
    assert not lack(tmp_path, files, **values)


def test_links_are_followed(tmp_path: Path) -> None:
    """As in the hub's cache, and into a folder that is shared."""
    shared, folder = tmp_path / "shared", tmp_path / "model"
    for place in (shared, folder):
        place.mkdir()
    assert lack(folder, CONFIG)
    (shared / "model.safetensors").touch()
    (folder / "transformer").symlink_to(shared)
    assert not lack(folder, CONFIG)
    (folder / "transformer").unlink()
    (folder / "round").symlink_to(folder)  # looked into without end otherwise
    assert not lack(folder, (*CONFIG, "model.bin"))


def test_code_beside_the_model_may_serve_it(tmp_path: Path) -> None:
    """In SageMaker's folder, whose serving.properties names another one."""
    folder = tmp_path / "weights"
    assert lack(folder, CONFIG)
    (tmp_path / "model.py").touch()
    arguments = EngineArguments({"model": str(folder)})
    assert not lack_of_weights(ModelArtifacts("m", "x", str(folder), directory=tmp_path), arguments)


def test_model_of_a_store_is_named_by_its_url(tmp_path: Path) -> None:
    """Without its secrets; the folder is a cache's."""
    said = lack(tmp_path, CONFIG, "https://me:word@host/m.tar.gz")
    assert "host/m.tar.gz has no weights" in said
    assert "word" not in said
    assert str(tmp_path) not in said


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "my_loader", "ipc_cache"])
def test_formats_without_files_of_their_own(load_format: str) -> None:
    """Nor is a repository refused for them."""
    assert not needs_weights(load_format)
