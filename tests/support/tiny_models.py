"""Tiny random checkpoints that embed or rank: a BERT of two layers with a tokenizer of letters."""

import json
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
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
# As Alibaba's own keeps what its rotary positions need.
_NEW_CONFIG = """
from transformers import PretrainedConfig


class NewConfig(PretrainedConfig):
    model_type = "new"

    def __init__(self, rope_theta=10000.0, rope_scaling=None, **kwargs):
        super().__init__(**kwargs)
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
"""
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
    distilled = {"dim": HIDDEN, "hidden_dim": 3 * HIDDEN, "n_layers": 2, "n_heads": 2}
    models = {
        "CamembertForMaskedLM": (CamembertForMaskedLM, CamembertConfig, shifted),
        "CamembertModel": (CamembertModel, CamembertConfig, shifted),
        "CamembertForSequenceClassification": (
            CamembertForSequenceClassification, CamembertConfig, scored,
        ),
        "Data2VecTextModel": (Data2VecTextModel, Data2VecTextConfig, shifted),
        "DistilBertForMaskedLM": (DistilBertForMaskedLM, DistilBertConfig, distilled),
        "DistilBertForSequenceClassification": (
            DistilBertForSequenceClassification, DistilBertConfig, distilled | {"num_labels": 1},
        ),
        "DistilBertModel": (DistilBertModel, DistilBertConfig, distilled),
        "RobertaModel": (RobertaModel, RobertaConfig, shifted),
        "XLMRobertaForSequenceClassification": (
            XLMRobertaForSequenceClassification, XLMRobertaConfig, scored,
        ),
    }  # fmt: skip
    model, config, fields = models[architecture]
    return _save(model(config(**(_shape() | fields))), folder, ["input_ids", "attention_mask"])


def gte_v15(folder: Path, architecture: str) -> PreTrainedModel:
    """Write a gte v1.5 as Alibaba publishes it, and return Transformers' own of the same weights.

    Its positions are scaled as gte-large-en-v1.5's are. Transformers calls that scaling a linear
    one of another base: 1 / (base * s) ** (2i / d) / s ** (2 / d) with a factor s.
    """
    from transformers import (  # noqa: PLC0415 (Transformers before 5.18 has no such model)
        GteConfig,
        GteForSequenceClassification,
        GteModel,
    )

    classes = {"NewModel": GteModel, "NewForSequenceClassification": GteForSequenceClassification}
    base, factor, width = 1000.0, 2.0, 32
    fields = _shape(type_vocab_size=1, num_labels=1, attn_implementation="eager")
    scaled = {"rope_type": "linear", "factor": factor ** (2 / width), "rope_theta": base * factor}
    model = classes[architecture](GteConfig(**fields, rope_parameters=scaled)).eval()
    _save(model, folder, ["input_ids", "attention_mask"])
    published = fields | {
        "architectures": [architecture], "model_type": "new", "hidden_act": "gelu",
        "auto_map": {"AutoConfig": "configuration.NewConfig"}, "pack_qkv": True,
        "position_embedding_type": "rope", "rope_theta": base, "layer_norm_eps": 1e-12,
        "rope_scaling": {"type": "ntk", "factor": factor}, "layer_norm_type": "layer_norm",
        "dtype": "float32",
    }  # fmt: skip
    del published["attn_implementation"], published["num_labels"]
    _write_json(folder / "config.json", published | {"id2label": {"0": "LABEL_0"}})
    (folder / "configuration.py").write_text(_NEW_CONFIG, encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    published_names = {re.sub(r"^gte\.", "new.", name): each for name, each in tensors.items()}
    save_file(published_names, folder / "model.safetensors", metadata={"format": "pt"})
    return model


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
