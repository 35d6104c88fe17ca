"""A tiny random GPT-BigCode with the embedded model's tokenizer, and adapters of its modules."""

import shutil
from pathlib import Path
from random import Random

import torch
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.adapter_files import WEIGHTS, write_config, write_safetensors
from tests.support.text_models import spread

HIDDEN, HEADS, RANK = 128, 4, 4
ROWS = {
    "attn.c_attn": HIDDEN + 2 * HIDDEN // HEADS,
    "mlp.c_fc": 4 * HIDDEN,
}


def tiny_gpt_bigcode(folder: Path) -> Path:
    """Write the model: two layers, one head of keys and values for all queries."""
    torch.manual_seed(20261122)
    model = GPTBigCodeForCausalLM(
        GPTBigCodeConfig(
            vocab_size=1280, n_positions=512, n_embd=HIDDEN, n_layer=2, n_head=HEADS,
            multi_query=True, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )
    )  # fmt: skip
    spread(model)
    model.to(torch.float32).eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_DIR / name, folder)
    return folder


def gpt_bigcode_adapter(folder: Path, *modules: str) -> Path:
    """Write an adapter of these modules (names of `ROWS`) in both layers."""
    folder.mkdir(parents=True)
    rng = Random(1)
    shapes = {}
    for module in modules:
        for layer in range(2):
            name = f"base_model.model.transformer.h.{layer}.{module}.lora_"
            shapes[f"{name}A.weight"] = (RANK, HIDDEN)
            shapes[f"{name}B.weight"] = (ROWS[module], RANK)
    write_safetensors(folder / WEIGHTS, shapes, lambda: rng.gauss(0.0, 0.3))
    targets = [module.rpartition(".")[2] for module in modules]
    write_config(folder, r=RANK, lora_alpha=RANK, target_modules=targets)
    return folder
