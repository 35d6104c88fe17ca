"""Tiny random checkpoints that embed or rank: a BERT of two layers with a tokenizer of letters."""

import json
import string
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
    PreTrainedModel,
)

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
HIDDEN = 64
SEED = 20261121


def bert_embedder(folder: Path) -> Path:
    """Write a BERT whose sentence vector is the mean of its token vectors, not normalised."""
    _save(BertModel(_config(), add_pooling_layer=False), folder)
    _write_json(
        folder / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {
                "idx": 1,
                "name": "1",
                "path": "1_Pooling",
                "type": "sentence_transformers.models.Pooling",
            },
        ],
    )
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    return folder


def bert_ranker(folder: Path) -> Path:
    """Write a BERT cross-encoder: one score for a pair of texts."""
    return _save(BertForSequenceClassification(_config(num_labels=1)), folder)


def _config(**more: object) -> BertConfig:
    torch.manual_seed(SEED)
    return BertConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,  # heads of 32: vLLM's CPU kernel knows no 16
        max_position_embeddings=128,
        initializer_range=0.2,
        **more,
    )


def _vocabulary() -> list[str]:
    letters = string.ascii_lowercase + string.digits
    return [*SPECIALS, *letters, *(f"##{letter}" for letter in letters), *".,?!-"]


def _save(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir(parents=True)
    model.to(torch.float32).eval().save_pretrained(folder)
    words = folder / "vocab.txt"
    words.write_text("\n".join(_vocabulary()) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab_file=str(words), model_max_length=128).save_pretrained(folder)
    return folder


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")
