"""Mistral's own tokenizers and layout: params.json, consolidated weights; no option says so.

The tokenizer files are those that mistral_common carries, Tekken's cut to a small vocabulary; what
a prompt must be is told by mistral_common itself.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from integration.matrix.renamed import Config, Tensors

SENTENCEPIECE_VOCABULARY: Final = 32768
TEKKEN_VOCABULARY: Final = 2048
_TEKKEN_SPECIALS: Final = 1000
_NAMES: Final = {
    "model.layers.": "layers.", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
}  # fmt: skip


class ChatPrompts:
    """A tokenizer of mistral_common with the two calls of Transformers' that are compared by."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = MistralTokenizer.from_file(str(file))

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Return the ids of a text."""
        raw = self._tokenizer.instruct_tokenizer.tokenizer
        return {"input_ids": raw.encode(text, bos=True, eos=False)}

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: object) -> list[int]:
        """Return the ids of a chat: there is no template, mistral_common encodes it."""
        request: Any = ChatCompletionRequest(messages=messages)
        return list(self._tokenizer.encode_chat_completion(request).tokens)


def own_layout(tensors: Tensors, config: Config) -> None:
    """Mistral's names, its order of rotary positions, and what params.json is to say."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    for name in list(tensors):
        weight = tensors.pop(name)
        if ".q_proj." in name:
            weight = _as_rotated_in_pairs(weight, heads)
        if ".k_proj." in name:
            weight = _as_rotated_in_pairs(weight, groups)
        new = name
        for before, after in _NAMES.items():
            new = new.replace(before, after)
        tensors[new] = weight
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"],
        "head_dim": config["head_dim"], "hidden_dim": config["intermediate_size"],
        "n_heads": heads, "n_kv_heads": groups, "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"], "rope_theta": 10000.0,
        "max_position_embeddings": config["max_position_embeddings"],
    }  # fmt: skip
    config.clear()
    config["params"] = params


def _as_rotated_in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Transformers rotates a head's first half against its second, Mistral its neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_own_files(folder: Path, config: Config) -> None:
    """Put what `own_layout` made under the names that Mistral publishes."""
    (folder / "params.json").write_text(json.dumps(config["params"]), encoding="utf-8")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    for name in ("config.json", "generation_config.json"):
        (folder / name).unlink()


def write_tokenizer(kind: str, folder: Path) -> ChatPrompts:
    """Write the tokenizer of `kind` into `folder`; returns what says what a prompt must be."""
    return ChatPrompts(_WRITTEN[kind](folder))


def _v3(folder: Path) -> Path:
    data = resources.files("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    with resources.as_file(data) as file:
        return Path(shutil.copy(file, folder / "tokenizer.model.v3"))


def _tekken(folder: Path) -> Path:
    data = resources.files("mistral_common") / "data" / "tekken_240911.json"
    whole = json.loads(data.read_text("utf-8"))
    count = TEKKEN_VOCABULARY - _TEKKEN_SPECIALS
    whole["config"] |= {"default_vocab_size": TEKKEN_VOCABULARY, "num_vocab_tokens": count}
    cut = {"config": whole["config"], "vocab": whole["vocab"][:count]}
    file = folder / "tekken.json"
    file.write_text(json.dumps(cut), encoding="utf-8")
    return file


_WRITTEN: Final[Mapping[str, Callable[[Path], Path]]] = MappingProxyType(
    {"v3": _v3, "tekken": _tekken}
)
