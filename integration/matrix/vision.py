"""Tiny random checkpoints that see, with the processor Transformers compares by.

Importing this wants torchvision's transforms on the path (integration/package_copies.py).
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from integration.matrix import phi3_v_processor
from lmi_vllm.demo import DEMO_MODEL_DIR

SIDE: Final = 32  # pixels of the tower's input
PATCH: Final = 16
IMAGE_TOKENS: Final = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
QWEN_TOKENS: Final = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
FIRST_IMAGE_TOKEN: Final = 1280  # behind the embedded model's vocabulary
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}[IMG]{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_TOKENS: Final = {"qwen3_vl": QWEN_TOKENS, "paligemma": ("<image>",)}
_PLACES: Final = {  # of a picture in a message
    "paligemma": "",  # before the text, whatever it says
    "phi3_v": "<|image_1|>",
    "qwen3_vl": f"{QWEN_TOKENS[2]}{QWEN_TOKENS[0]}{QWEN_TOKENS[3]}",
}
_CUT_TOWERS: Final = ("clip_vision_model", "siglip_vision_model")
_TOWER: Final = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.2,
}  # fmt: skip


def tower(**more: object) -> dict[str, object]:
    """The vision part of a configuration."""
    return _TOWER | more


class SightedPhi3(transformers.Phi3ForCausalLM):  # type: ignore[misc,unused-ignore]
    """Phi-3-Vision, which Transformers has no class for: its Phi-3 and its CLIP, joined by us."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        tower = transformers.CLIPVisionConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16,
            image_size=336, patch_size=14, hidden_act="quick_gelu", attn_implementation="eager",
        )  # fmt: skip
        self.eyes = torch.nn.Module()
        self.eyes.img_processor = transformers.CLIPVisionModel(tower)
        self.eyes.glb_GN = torch.nn.Parameter(torch.zeros(1, 1, 4096))
        self.eyes.sub_GN = torch.nn.Parameter(torch.zeros(1, 1, 1, 4096))
        size = config.hidden_size
        self.eyes.img_projection = torch.nn.Sequential(
            torch.nn.Linear(4096, size), torch.nn.GELU(), torch.nn.Linear(size, size)
        )

    def generate(self, input_ids: torch.Tensor, pixel_values: Any = None, **more: Any) -> Any:
        """As Transformers does, from embeddings."""
        more.pop("image_sizes", None)
        embedded = self.model.embed_tokens(input_ids)
        if pixel_values is not None:
            embedded[input_ids == phi3_v_processor.IMAGE_TOKEN] = self._seen(pixel_values[0])
        return super().generate(inputs_embeds=embedded, **more)

    def _seen(self, views: torch.Tensor) -> torch.Tensor:
        """The crop, a separator and the whole: neighbours four by four, each row with its end."""
        out = self.eyes.img_processor(views, output_hidden_states=True)
        patches = out.hidden_states[1][:, 1:].unflatten(1, (12, 2, 12, 2))
        grid = patches.permute(0, 1, 3, 2, 4, 5).flatten(3)  # view, row, column, four patches
        ended = torch.cat((grid, self.eyes.sub_GN.expand(2, 12, -1, -1)), dim=2).flatten(1, 2)
        whole, crop = ended
        return self.eyes.img_projection(torch.cat((crop, self.eyes.glb_GN[0], whole)))


OWN_CLASSES: Final = MappingProxyType({"SightedPhi3": SightedPhi3})


def write_processor(kind: str, folder: Path) -> Any:
    """Write tokenizer and image processor of `kind` into `folder`; returns the processor."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    tokens = _TOKENS.get(kind, IMAGE_TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = _TEMPLATE.replace(IMAGE_TOKENS[0], _PLACES.get(kind, tokens[0]))
    tokenizer.save_pretrained(folder)
    processor = _PROCESSORS[kind](tokenizer)
    processor.chat_template = tokenizer.chat_template
    if kind == "phi3_v":
        _write_code(folder)
    else:
        processor.save_pretrained(folder)
    return processor


def _write_code(folder: Path) -> None:
    """The processor as code of the checkpoint."""
    shutil.copy(phi3_v_processor.__file__, folder / "processing_family.py")
    named = {"auto_map": {"AutoProcessor": "processing_family.Phi3VProcessor"},
             "processor_class": "Phi3VProcessor"}  # fmt: skip
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).write_text(json.dumps(named), encoding="utf-8")


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


def _gemma3(tokenizer: Any) -> Any:
    """What stands for a picture in a text is Gemma's begin of image; others fill its place."""
    begin, place, end = IMAGE_TOKENS
    named = {"boi_token": begin, "image_token": place, "eoi_token": end}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        own = AutoTokenizer.from_pretrained(folder, extra_special_tokens=named)
    own.add_tokens(["\n" * count for count in range(1, 5)])  # Gemma's; vLLM asks for them
    images = transformers.Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    return transformers.Gemma3Processor(images, own, image_seq_length=(SIDE // PATCH) ** 2)


def _qwen3_vl(tokenizer: Any) -> Any:
    """The smallest picture is two by two places, each of four patches."""
    limits = {"shortest_edge": (2 * SIDE) ** 2, "longest_edge": (2 * SIDE) ** 2}
    given: dict[str, Any] = {
        "size": limits, "patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    image, video, start, end = QWEN_TOKENS
    for name, text in (
        ("image", image),
        ("video", video),
        ("vision_start", start),
        ("vision_end", end),
    ):
        setattr(tokenizer, f"{name}_token", text)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**given),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(**given),
    )


def _paligemma(tokenizer: Any) -> Any:
    tokenizer.add_tokens("\n")  # Gemma's; vLLM asks for it
    images = transformers.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = (SIDE // PATCH) ** 2
    tokenizer.image_token, tokenizer.image_token_id = "<image>", FIRST_IMAGE_TOKEN
    return transformers.PaliGemmaProcessor(images, tokenizer)


def _mllama(tokenizer: Any) -> Any:
    images = transformers.MllamaImageProcessor(size={"height": SIDE, "width": SIDE})
    tokenizer.image_token, tokenizer.image_token_id = IMAGE_TOKENS[0], FIRST_IMAGE_TOKEN
    return transformers.MllamaProcessor(images, tokenizer)


def _phi3_v(tokenizer: Any) -> Any:
    return phi3_v_processor.Phi3VProcessor(tokenizer)


_PROCESSORS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "llava_next": _llava_next,
        "pixtral": _pixtral,
        "gemma3": _gemma3,
        "mllama": _mllama,
        "paligemma": _paligemma,
        "phi3_v": _phi3_v,
        "qwen3_vl": _qwen3_vl,
    }
)


def published_names(folder: Path) -> None:
    """Write a tower as published checkpoints have it; Transformers 5 leaves a part out."""
    path = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("vision_config", {}).get("model_type") not in _CUT_TOWERS:
        return
    tensors = {}
    for name, value in load_file(path).items():
        new = name
        if "vision_tower." in name and "vision_model." not in name:
            new = name.replace("vision_tower.", "vision_tower.vision_model.")
        tensors[new] = value
    save_file(tensors, path, metadata={"format": "pt"})
