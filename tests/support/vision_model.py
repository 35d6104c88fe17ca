"""A tiny random model that sees: a Pixtral tower before a two-layer Mistral, bytes as tokens."""

import io
import json
import random
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

SPECIALS = ("<s>", "</s>", "<pad>", "<unk>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
SIDE = 64  # pixels; an image of this size is not resized, so every processor sees the same
PATCH = 16
SEED = 20261121
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif not blind %}[IMG]{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def vision_model(folder: Path) -> Path:
    """Write the checkpoint, its tokenizer and its processor files."""
    folder.mkdir(parents=True)
    torch.manual_seed(SEED)
    LlavaForConditionalGeneration(_config()).to(torch.float32).eval().save_pretrained(folder)
    tokenizer = _tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    _image_processor().save_pretrained(folder)
    # Written by hand: the class itself wants torchvision.
    processor = {
        "processor_class": "PixtralProcessor",
        "patch_size": PATCH,
        "spatial_merge_size": 1,
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder


def picture(seed: int) -> bytes:
    """Return a PNG of coloured noise."""
    pixels = random.Random(seed).randbytes(SIDE * SIDE * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), pixels).save(file, "PNG")
    return file.getvalue()


@torch.inference_mode()
def greedy_tokens(folder: Path, text: str, image: bytes, count: int) -> list[int]:
    """Return what Transformers generates after one user message of `text` and then the image."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([_prompt_ids(folder, text)])
    with Image.open(io.BytesIO(image)) as opened:
        inputs = _image_processor()(images=[opened], return_tensors="pt")
    pictures = {name: inputs[name] for name in ("pixel_values", "image_sizes")}
    start = ids.shape[1]
    for _ in range(count):
        logits = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **pictures
        ).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [int(token) for token in ids[0, start:]]


def _prompt_ids(folder: Path, text: str) -> list[int]:
    """Return the tokens of one user message, a placeholder for each patch of its image."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    content = [{"type": "text", "text": text}, {"type": "image"}]
    # Not written by hand: templates are rendered with trim_blocks, which eats newlines.
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    rows = ["[IMG]" * (SIDE // PATCH)] * (SIDE // PATCH)
    patches = "[IMG_BREAK]".join(rows) + "[IMG_END]"
    return [int(token) for token in tokenizer.encode(str(prompt).replace("[IMG]", patches))]


def _config() -> LlavaConfig:
    tower = PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        initializer_range=0.2,
    )
    text = MistralConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU kernel knows no 16
        max_position_embeddings=1024,
        sliding_window=None,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=SPECIALS.index("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def _vocabulary() -> dict[str, int]:
    names = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return {name: number for number, name in enumerate(names)}


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    letters.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=letters,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "[IMG]"},
    )


def _image_processor() -> PixtralImageProcessorPil:
    return PixtralImageProcessorPil(
        size={"longest_edge": SIDE}, patch_size={"height": PATCH, "width": PATCH}
    )
