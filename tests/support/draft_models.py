"""Drafters of the embedded model, one of each kind: what speculative decoding takes as its model.

Nothing is trained by steps: the one matrix of each that matters is the least-squares answer to
"which token follows", over a text the embedded model wrote itself, so that drafts are accepted.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmi_vllm.demo import DEMO_MODEL_DIR

STORY: Final = "Once upon a time"
MEDUSA_HEADS: Final = 3
_WRITTEN: Final = 400  # tokens
# Layers that EAGLE-3 reads. Unless told, vLLM takes 2, n // 2 and n - 3: of four, 2 and 1.
_READ_LAYERS: Final = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class _Text:
    """What the embedded model wrote, and what it thought meanwhile."""

    config: Mapping[str, Any]
    ids: torch.Tensor
    hidden: tuple[torch.Tensor, ...]  # embeddings, then each layer's output; the last one normed
    head: torch.Tensor


def draft_model(folder: Path) -> Path:
    """Write a whole model that drafts: the embedded one itself."""
    leave_out = shutil.ignore_patterns("serving.properties", "adapters")
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=leave_out)
    return folder


def eagle_head(folder: Path) -> Path:
    """Write an EAGLE head as published: a Llama of one layer beside `fc`."""
    text = _text()
    state = text.hidden[-1]
    known = torch.cat((text.hidden[0][1:], state[:-1]), dim=1)  # the next token and what led to it
    tensors = {"fc.weight": _fitted(known, state[1:]), **_silent_layer(text.config, "layers.0.")}
    return _written(folder, _one_layer(text.config, "LlamaForCausalLM"), tensors)


def eagle3_head(folder: Path) -> Path:
    """Write an EAGLE-3 head as published: `midlayer`, and a head of its own."""
    text = _text()
    size = text.config["hidden_size"]
    tensors = {
        "fc.weight": torch.cat([torch.zeros(size, 2 * size), torch.eye(size)], dim=1),
        "norm.weight": torch.ones(size),
        "lm_head.weight": _next_token(_normed(text.hidden[_READ_LAYERS[-1]]), text, ahead=2),
        **_silent_layer(text.config, "midlayer.", reads=2),
        "midlayer.hidden_norm.weight": torch.ones(size),
        "midlayer.input_layernorm.weight": torch.ones(size),
    }
    config = _one_layer(text.config, "LlamaForCausalLMEagle3")
    config |= {
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(_READ_LAYERS),
        "tie_word_embeddings": False,
    }
    return _written(folder, config, tensors)


def medusa_heads(folder: Path) -> Path:
    """Write Medusa heads as published: no `model_type`, bare numbers as names."""
    text = _text()
    size = text.config["hidden_size"]
    tensors = {}
    for head in range(MEDUSA_HEADS):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(size, size)
        tensors[f"{head}.1.weight"] = _next_token(text.hidden[-1], text, ahead=head + 2)
    config = {
        "medusa_num_heads": MEDUSA_HEADS,
        "medusa_num_layers": 1,
        "hidden_size": size,
        "vocab_size": text.config["vocab_size"],
    }
    return _written(folder, config, tensors)


DRAFTERS: Final[Mapping[str, Callable[[Path], Path]]] = MappingProxyType(
    {
        "draft_model": draft_model,
        "eagle": eagle_head,
        "eagle3": eagle3_head,
        "medusa": medusa_heads,
    }
)


def _text() -> _Text:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32).eval()
    start = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)(STORY, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(
            **start, do_sample=False, max_new_tokens=_WRITTEN, min_new_tokens=_WRITTEN
        )
        out = model(ids, output_hidden_states=True)
    config = json.loads((DEMO_MODEL_DIR / "config.json").read_text("utf-8"))
    hidden = tuple(layer[0].clone() for layer in out.hidden_states)
    return _Text(config, ids[0], hidden, model.lm_head.weight.detach())


def _fitted(known: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The matrix that makes `wanted` of `known`, row by row."""
    return torch.linalg.lstsq(known, wanted, driver="gelsd").solution.T


def _next_token(known: torch.Tensor, text: _Text, ahead: int) -> torch.Tensor:
    """A head that names the token `ahead` of the one each row of `known` belongs to."""
    wanted = torch.nn.functional.one_hot(text.ids[ahead:], text.config["vocab_size"]).float()
    return _fitted(known[:-ahead], wanted)


def _normed(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(values, values.shape[-1:], eps=1e-6)


def _silent_layer(config: Mapping[str, Any], start: str, reads: int = 1) -> dict[str, torch.Tensor]:
    """A Llama layer that hands on what it gets; its attention reads `reads` times the width."""
    size, width, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, groups = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, reads * size),
        "self_attn.k_proj": (groups, reads * size),
        "self_attn.v_proj": (groups, reads * size),
        "self_attn.o_proj": (size, queries),
        "mlp.gate_proj": (width, size),
        "mlp.up_proj": (width, size),
        "mlp.down_proj": (size, width),
    }
    tensors = {f"{start}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    return tensors | {f"{start}post_attention_layernorm.weight": torch.ones(size)}


def _one_layer(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    return {**config, "architectures": [architecture], "num_hidden_layers": 1}


def _written(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
