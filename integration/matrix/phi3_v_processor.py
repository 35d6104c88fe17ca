"""The processor code of the tiny Phi-3-Vision checkpoint, which is copied into it.

Ours, and smaller than the published one: every picture becomes 336 x 336, seen whole and as its one
crop. What vLLM asks of a processor is the same: `img_tokens`, the number of tokens, the tensors.
"""

import re
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin

SIDE = 336
IMAGE_TOKEN = 32044  # what vLLM takes for the picture's places
TOKENS = 2 * 12 * 13 + 1  # whole and crop: 12 rows of 12 with a line end; a separator
PLACE = re.compile(r"(<\|image_\d+\|>)")


class Phi3VProcessor(ProcessorMixin):  # type: ignore[misc,unused-ignore]
    """Text and pictures to the model's tensors."""

    attributes = ["tokenizer"]  # noqa: RUF012 - as Transformers has it
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer: Any = None, **_: Any) -> None:
        super().__init__(tokenizer)

    @property
    def img_tokens(self) -> list[str]:
        """What stands in a text for its pictures."""
        return [f"<|image_{number}|>" for number in range(1, 17)]

    def calc_num_image_tokens_from_image_size(self, width: int, height: int) -> int:
        """As many for every size."""
        del width, height
        return TOKENS

    def __call__(self, text: Any = None, images: Any = None, **_: Any) -> BatchFeature:
        """The tokens of the one text, and the pictures."""
        ids = [number for part in PLACE.split(_one(text)) for number in self._tokens(part)]
        tensors: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if images:
            tensors["pixel_values"] = torch.stack([_seen(image) for image in images])
            tensors["image_sizes"] = torch.tensor([[SIDE, SIDE]] * len(images))
        return BatchFeature(tensors)

    def _tokens(self, part: str) -> list[int]:
        if PLACE.fullmatch(part):
            return [IMAGE_TOKEN] * TOKENS
        return list(self.tokenizer(part)["input_ids"]) if part else []


def _one(text: Any) -> str:
    return str(text[0] if isinstance(text, list) else text)


def _seen(image: Any) -> torch.Tensor:
    """The picture twice: whole, and the crop that is all of it."""
    scaled = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.float32) / 127.5 - 1
    return torch.from_numpy(scaled).permute(2, 0, 1).expand(2, -1, -1, -1).contiguous()
