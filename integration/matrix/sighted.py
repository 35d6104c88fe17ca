"""Tiny random checkpoints that see, with the processor Transformers compares by.

Importing this wants torchvision's transforms on the path (integration/torchvision_copy.py).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from lmi_vllm.demo import DEMO_MODEL_DIR

SIDE: Final = 32  # pixels of the tower's input
PATCH: Final = 16
IMAGE_TOKENS: Final = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
FIRST_IMAGE_TOKEN: Final = 1280  # behind the embedded model's vocabulary
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}[IMG]{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_TOWER: Final = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.2,
}  # fmt: skip


def tower(**more: object) -> dict[str, object]:
    """The vision part of a configuration."""
    return _TOWER | more


def write_processor(kind: str, folder: Path) -> Any:
    """Write tokenizer and image processor of `kind` into `folder`; returns the processor."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    processor = _PROCESSORS[kind](tokenizer)
    processor.chat_template = _TEMPLATE
    processor.save_pretrained(folder)
    return processor


def _llava_next(tokenizer: Any) -> Any:
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=[[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]],
    )  # fmt: skip
    return transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, image_token=IMAGE_TOKENS[0],
    )  # fmt: skip


def _pixtral(tokenizer: Any) -> Any:
    images = transformers.PixtralImageProcessor(
        size={"longest_edge": 2 * SIDE}, patch_size={"height": PATCH, "width": PATCH}
    )
    image, stop, end = IMAGE_TOKENS
    return transformers.PixtralProcessor(
        images, tokenizer, patch_size=PATCH, spatial_merge_size=1,
        image_token=image, image_break_token=stop, image_end_token=end,
    )  # fmt: skip


def _mllama(tokenizer: Any) -> Any:
    images = transformers.MllamaImageProcessor(size={"height": SIDE, "width": SIDE})
    tokenizer.image_token, tokenizer.image_token_id = IMAGE_TOKENS[0], FIRST_IMAGE_TOKEN
    return transformers.MllamaProcessor(images, tokenizer)


_PROCESSORS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {"llava_next": _llava_next, "pixtral": _pixtral, "mllama": _mllama}
)


def published_names(folder: Path) -> None:
    """Write a CLIP tower as published checkpoints have it; Transformers 5 leaves a part out."""
    path = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config["vision_config"]["model_type"] != "clip_vision_model":
        return
    tensors = {}
    for name, value in load_file(path).items():
        new = name
        if "vision_tower." in name and "vision_model." not in name:
            new = name.replace("vision_tower.", "vision_tower.vision_model.")
        tensors[new] = value
    save_file(tensors, path, metadata={"format": "pt"})
