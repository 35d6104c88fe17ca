"""Weights are read ahead in the order in which vLLM's own loader reads them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import _natural_sort_key

from lmi_vllm.features.weights_ahead.files import KINDS, weight_files

pytestmark = pytest.mark.vllm
NAMES = ("model-10.safetensors", "model-9.safetensors", "x.safetensors", "model.bin", "w.pt")


@pytest.mark.parametrize("load_format", sorted(KINDS.keys() - {"bitsandbytes"}))
@pytest.mark.parametrize("consolidated", [False, True])
def test_files_and_order_are_those_of_vllm(
    load_format: str, consolidated: bool, tmp_path: Path
) -> None:
    """Also beside an index, which names two of them."""
    for name in (*NAMES, *(["consolidated.safetensors"] if consolidated else [])):
        (tmp_path / name).write_bytes(b"x")
    index = {"weight_map": {"a": NAMES[0], "b": NAMES[0], "c": NAMES[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    ours = weight_files(tmp_path, load_format)
    if not ours:
        with pytest.raises(RuntimeError, match="Cannot find any model weights"):
            loader._prepare_weights(str(tmp_path), None, None, True, None)
        return
    _, theirs, _, _ = loader._prepare_weights(str(tmp_path), None, None, True, None)
    assert list(map(str, ours)) == sorted(theirs, key=_natural_sort_key)
