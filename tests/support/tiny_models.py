"""Tiny random checkpoints that embed or rank: a BERT of two layers with a tokenizer of letters."""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
    CamembertConfig,
    CamembertForMaskedLM,
    CamembertForSequenceClassification,
    CamembertModel,
    Data2VecTextConfig,
    Data2VecTextModel,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

SPOILT_LETTER = "q"  # its vector is NaN where that is asked for
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
HIDDEN = 64
SEED = 20261121


def bert_embedder(folder: Path, *, is_marked_not_finite: bool = False) -> Path:
    """Write a BERT whose sentence vector is the mean of its token vectors, not normalised."""
    model = BertModel(_config(), add_pooling_layer=False)
    _save(_with_nan(model) if is_marked_not_finite else model, folder)
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


def bert_ranker(folder: Path, *, is_marked_not_finite: bool = False) -> Path:
    """Write a BERT cross-encoder: one score for a pair of texts."""
    model = BertForSequenceClassification(_config(num_labels=1))
    return _save(_with_nan(model) if is_marked_not_finite else model, folder)


def family_member(folder: Path, architecture: str) -> Path:
    """Write a model of BERT's younger families, whose tokenizer makes no token types."""
    shifted = _shape(pad_token_id=1, max_position_embeddings=130, type_vocab_size=1)
    scored = shifted | {"num_labels": 1}
    distilled = {"dim": HIDDEN, "hidden_dim": 2 * HIDDEN, "n_layers": 2, "n_heads": 2}
    models = {
        "CamembertForMaskedLM": (CamembertForMaskedLM, CamembertConfig, shifted),
        "CamembertModel": (CamembertModel, CamembertConfig, shifted),
        "CamembertForSequenceClassification": (
            CamembertForSequenceClassification, CamembertConfig, scored,
        ),
        "Data2VecTextModel": (Data2VecTextModel, Data2VecTextConfig, shifted),
        "DistilBertModel": (DistilBertModel, DistilBertConfig, distilled),
        "RobertaModel": (RobertaModel, RobertaConfig, shifted),
        "XLMRobertaForSequenceClassification": (
            XLMRobertaForSequenceClassification, XLMRobertaConfig, scored,
        ),
    }  # fmt: skip
    model, config, fields = models[architecture]
    return _save(model(config(**(_shape() | fields))), folder, ["input_ids", "attention_mask"])


def _with_nan(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        model.get_input_embeddings().weight[_vocabulary().index(SPOILT_LETTER)] = float("nan")
    return model


def _config(**more: object) -> BertConfig:
    return BertConfig(**_shape(), **more)


def _shape(**more: object) -> dict[str, Any]:
    """Return a config's fields; weights that are made next are the same each time."""
    torch.manual_seed(SEED)
    return {
        "vocab_size": len(_vocabulary()),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # heads of 32: vLLM's CPU kernel knows no 16
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    } | more


def _vocabulary() -> list[str]:
    letters = string.ascii_lowercase + string.digits
    return [*SPECIALS, *letters, *(f"##{letter}" for letter in letters), *".,?!-"]


def _save(
    model: PreTrainedModel,
    folder: Path,
    inputs: Sequence[str] = BertTokenizerFast.model_input_names,
) -> Path:
    folder.mkdir(parents=True)
    model.to(torch.float32).eval().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(_vocabulary()) + "\n", encoding="utf-8")
    vocabulary = {word: number for number, word in enumerate(_vocabulary())}
    tokenizer = BertTokenizerFast(
        vocab=vocabulary, model_max_length=128, model_input_names=list(inputs)
    )
    tokenizer.save_pretrained(folder)
    return folder


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")
