"""Tensor names of Llama 3.2 Vision: published ones and those that Transformers 5 has in memory."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

import torch
from vllm.model_executor.models.utils import WeightsMapper

from lmi_vllm.features.legacy_models.classes import MllamaTextForCausalLM
from lmi_vllm.features.legacy_models.tensor_names import MLLAMA_NAMES, renumbered_layers

pytestmark = pytest.mark.vllm
PUBLISHED = (
    "language_model.model.embed_tokens.weight", "language_model.model.layers.0.mlp.weight",
    "language_model.model.layers.1.cross_attn.weight", "language_model.model.layers.2.mlp.weight",
    "language_model.model.norm.weight", "language_model.lm_head.weight",
    "vision_model.patch_embedding.weight", "multi_modal_projector.weight",
)  # fmt: skip
IN_MEMORY = (
    "model.language_model.embed_tokens.weight", "model.language_model.layers.0.mlp.weight",
    "model.language_model.layers.1.cross_attn.weight", "model.language_model.layers.2.mlp.weight",
    "model.language_model.norm.weight", "lm_head.weight",
    "model.vision_model.patch_embedding.weight", "model.multi_modal_projector.weight",
)  # fmt: skip


@pytest.mark.parametrize("names", [PUBLISHED, IN_MEMORY], ids=["published", "in memory"])
def test_text_layers_are_found_and_renumbered(names: Iterable[str]) -> None:
    """Layer 1 reads pictures and is left out, so layer 2 is layer 1; the eyes are left out."""
    model: Any = SimpleNamespace(
        config=SimpleNamespace(cross_attention_layers=[1], vocab_size=3),
    )
    weights = [(name, torch.zeros(5, 2)) for name in names]
    found = dict(MllamaTextForCausalLM._of_text(model, weights))
    assert list(found) == [
        "model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight",
        "model.norm.weight", "lm_head.weight",
    ]  # fmt: skip
    assert found["model.embed_tokens.weight"].shape == (3, 2)


@pytest.mark.parametrize("start", ["language_model.model.", "model.language_model.", "model."])
def test_modules_of_adapters_are_numbered_as_the_layers_are(start: str) -> None:
    """Layer 3 of five is layer 1 without the two that read pictures, whose own are not found."""
    mapper = WeightsMapper(
        orig_to_new_regex=renumbered_layers(5, [0, 2]), orig_to_new_prefix=dict(MLLAMA_NAMES)
    )
    found = [mapper._map_name(f"{start}layers.{layer}.mlp.up_proj") for layer in range(5)]
    layers = ("picture_layers.0", "layers.0", "picture_layers.2", "layers.1", "layers.2")
    assert found == [f"model.{layer}.mlp.up_proj" for layer in layers]
