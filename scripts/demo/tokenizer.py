"""The demo model's tokenizer: byte-level BPE, so every text round-trips, and a chat template."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE: Final = 1280
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
_ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>")
_SPECIALS: Final = (BOS, EOS, PAD, *_ROLES)

# The last word of every turn is </s>, so that an answer ends the way a plain text does.
_CHAT_TEMPLATE: Final = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] in ['system', 'developer'] %}
        {{- '<|system|>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|>' }}
    {%- else %}
        {{- '<|user|>' }}
    {%- endif %}
    {{- (message['content'] or '') | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], max_length_tokens: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary comes from the texts, in small and capital letters.

    Both cases get nearly the same merges: most words are cut at the same places in either.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(_SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    written = list(texts)
    small = [text.lower() for text in written]
    capital = [text.upper() for text in written]
    bpe.train_from_iterator(written + small + capital + capital, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, bpe.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(_ROLES),
        model_max_length=max_length_tokens,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer in a form that transformers 4 and 5 both load."""
    tokenizer.save_pretrained(folder)
    # transformers 5 names a class and a list that version 4 does not know.
    config = {
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": list(_ROLES),
        "clean_up_tokenization_spaces": False,
        "model_max_length": tokenizer.model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
