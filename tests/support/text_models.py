"""Tiny random encoder-decoder checkpoints: a T5 whose tokenizer writes blanks as T5's does."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

SEED = 20261121
LENGTH = 640
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SPECIALS = ("<pad>", "</s>", "<unk>", "<extra_id_0>")
TEXT = (
    "The capital of France is Paris. Once upon a time there was a little boat in the harbour; "
    "it sailed to the north, where the moon is cold, and came back with a red and green lamp! "
    "translate English to German: How old are you? summarize: the house is wonderful."
)


def tiny_t5(folder: Path, *, has_template: bool = True, **config: Any) -> Path:
    """Write a T5 of two layers whose greedy answers differ with the prompt and the position."""
    torch.manual_seed(SEED)
    tokenizer = sentencepiece_tokenizer()
    if has_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    settings = {
        "vocab_size": len(tokenizer), "n_positions": LENGTH, "tie_word_embeddings": False,
        **sizes, **ids, **config,
    }  # fmt: skip
    model = T5ForConditionalGeneration(T5Config(**settings))
    spread(model)
    model.to(torch.float32).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def spread(model: Any) -> None:
    """Give the weights a width at which greedy answers are no row of one word."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 4.0 if "relative" in name else 0.3)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes a blank as part of the word behind it, and ends prompts."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=256, special_tokens=list(SPECIALS), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<extra_id_0>"], model_max_length=LENGTH,
    )  # fmt: skip
