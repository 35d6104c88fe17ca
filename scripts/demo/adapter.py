"""LoRA by hand: low-rank updates on a model's projections, saved in PEFT's layout."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn

RANK: Final = 16
ALPHA: Final = 32
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trainable update of rank `RANK`, zero at the start."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the layer's output with the scaled update added."""
        update = inputs @ self.down.T @ self.up.T
        return self.base(inputs) + update * (ALPHA / RANK)


def attach_adapter(model: nn.Module) -> dict[str, LoraLinear]:
    """Freeze the model and wrap its target projections; return the wrappers by module name."""
    model.requires_grad_(requires_grad=False)
    wrapped: dict[str, LoraLinear] = {}
    for name, module in list(model.named_modules()):
        leaf = name.rpartition(".")[2]
        if leaf in TARGETS and isinstance(module, nn.Linear):
            wrapped[name] = LoraLinear(module)
            model.set_submodule(name, wrapped[name])
    return wrapped


def detach_adapter(model: nn.Module, wrapped: dict[str, LoraLinear]) -> None:
    """Put the original projections back."""
    for name, layer in wrapped.items():
        model.set_submodule(name, layer.base)


def save_adapter(wrapped: dict[str, LoraLinear], folder: Path, base_name: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in wrapped.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = layer.down.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = layer.up.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
