"""Architectures that vLLM dropped: what they are served as, and who overrides it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.features.legacy_models import MODEL_CLASSES
from lmi_vllm.features.legacy_models.architectures import FAMILIES
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate_checkpoint
from tests.unit.conftest import ExplainRun

OTHER_CLASS = '{"architectures": ["LlamaForCausalLM"]}'


def mapped(
    folder: Path, architecture: str, fields: dict[str, Any] | None = None, **arguments: Any
) -> tuple[Any, tuple[str, ...]]:
    """The overrides for a fetched checkpoint of this architecture, and what was said."""
    config = json.dumps({"architectures": [architecture]} | (fields or {}))
    (folder / "config.json").write_text(config, encoding="utf-8")
    model = ModelArtifacts("m", str(folder), str(folder))
    given = EngineArguments(arguments, {})
    result = translate_checkpoint(load_settings({}), model, Devices(), given)
    return result.arguments.values.get("hf_overrides"), result.warnings


@pytest.mark.parametrize("own", ["AquilaForCausalLM", "AquilaModel", "InternLMForCausalLM"])
def test_llama_shaped_family_is_served_as_llama(tmp_path: Path, own: str) -> None:
    """The override names Llama, and one sentence says so."""
    overrides, said = mapped(tmp_path, own)
    assert overrides == {"architectures": ["LlamaForCausalLM"]}
    assert len(said) == 1
    assert said[0].startswith(f"architecture {own} is served as LlamaForCausalLM")


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_camembert_is_served_as_roberta(tmp_path: Path, head: str) -> None:
    """VLLM's Transformers backend would count its positions from 0 and answer other vectors."""
    overrides, (said,) = mapped(tmp_path, f"Camembert{head}")
    assert overrides == {"architectures": [f"Roberta{head}"]}
    assert "misplaces its positions" in said


def test_data2vec_is_served_as_roberta(tmp_path: Path) -> None:
    """As CamemBERT, and for the same reason; its other heads are refused."""
    overrides, _ = mapped(tmp_path, "Data2VecTextModel", {"model_type": "data2vec-text"})
    assert overrides == {"architectures": ["RobertaModel"]}


@pytest.mark.parametrize(
    ("own", "fields", "is_refused"),
    [
        ("Data2VecTextForSequenceClassification", {"model_type": "data2vec-text"}, True),
        ("XmodModel", {"model_type": "xmod"}, True),
        ("CamembertForTokenClassification", {"model_type": "camembert"}, True),
        ("EsmModel", {"model_type": "esm", "position_embedding_type": "absolute"}, True),
        ("EsmModel", {"model_type": "esm", "position_embedding_type": "rotary"}, False),
        ("XLMRobertaXLModel", {"model_type": "xlm-roberta-xl"}, False),
        ("ElectraModel", {"model_type": "electra"}, False),
    ],
)
def test_encoder_at_wrong_positions_is_refused(
    tmp_path: Path, own: str, fields: dict[str, Any], is_refused: bool
) -> None:
    """It would answer other vectors, with 200; `architectures` in hf_overrides is the user's."""
    mapped(tmp_path, own, fields)
    model = ModelArtifacts("m", str(tmp_path), str(tmp_path))
    for overrides, refuses in (({}, is_refused), ({"architectures": ["RobertaModel"]}, False)):
        given = EngineArguments({"hf_overrides": overrides}, {})
        errors = translate_checkpoint(load_settings({}), model, Devices(), given).errors
        assert [own in error for error in errors] == [True] * refuses


def test_dbrx_is_served_by_our_class(tmp_path: Path) -> None:
    """Although vLLM lists the name."""
    overrides, _ = mapped(tmp_path, "DbrxForCausalLM")
    assert overrides == {"architectures": ["LmiDbrxForCausalLM"]}


@pytest.mark.parametrize("enable_lora", [True, False])
def test_starcoder_is_served_by_our_class_with_adapters(tmp_path: Path, enable_lora: bool) -> None:
    """Without them vLLM's own is as good, and nothing is said."""
    overrides, said = mapped(tmp_path, "GPTBigCodeForCausalLM", enable_lora=enable_lora)
    if not enable_lora:
        assert (overrides, said) == (None, ())
        return
    assert overrides == {"architectures": ["LmiGPTBigCodeForCausalLM"]}
    assert "adapters of its c_attn; vLLM" in said[0]
    assert "has no LoRA layer for it" in said[0]


def test_every_own_model_class_is_registered() -> None:
    """Under the names that overrides use, where the engine's processes start."""
    served = {family.served_as for families in FAMILIES.values() for family in families}
    assert set(MODEL_CLASSES) == {name for name in served if name.startswith("Lmi")}


def test_other_overrides_are_kept(tmp_path: Path) -> None:
    """What the user overrides beside the architecture still counts."""
    overrides, _ = mapped(tmp_path, "AquilaForCausalLM", hf_overrides={"rope_theta": 1e6})
    assert overrides == {"architectures": ["LlamaForCausalLM"], "rope_theta": 1e6}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"hf_overrides": {"architectures": ["MyLM"]}}, id="own architecture"),
        pytest.param({"model_impl": "transformers"}, id="own implementation"),
        pytest.param({"hf_overrides": "not an object"}, id="unreadable overrides"),
    ],
)
def test_user_wins(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Nothing is changed, and nothing said, where the user has decided."""
    overrides, said = mapped(tmp_path, "AquilaForCausalLM", **arguments)
    assert (overrides, said) == (arguments.get("hf_overrides"), ())


THIRTEEN_B = {"hidden_size": 5120, "model_max_length": 4096, "vocab_size": 64000}
SEVEN_B = {"max_position_embeddings": 4096, "hidden_size": 4096}
MPT = {"n_heads": 32, "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None}}


@pytest.mark.parametrize(
    ("own", "fields", "overrides"),
    [
        ("BaiChuanForCausalLM", SEVEN_B, {"architectures": ["LmiBaichuanForCausalLM"]}),
        ("BaichuanForCausalLM", SEVEN_B, {"architectures": ["LmiBaichuan2ForCausalLM"]}),
        (
            "BaichuanForCausalLM",
            THIRTEEN_B,
            {"architectures": ["LmiBaichuanAlibiForCausalLM"], "max_position_embeddings": 4096},
        ),
        (
            "BaichuanForCausalLM",
            THIRTEEN_B | {"vocab_size": 125696},
            {"architectures": ["LmiBaichuan2AlibiForCausalLM"], "max_position_embeddings": 4096},
        ),
        (
            "BaichuanForCausalLM",
            THIRTEEN_B | {"z_loss_weight": 0},
            {"architectures": ["LmiBaichuan2AlibiForCausalLM"], "max_position_embeddings": 4096},
        ),
        (
            "MllamaForConditionalGeneration",
            {"text_config": {"cross_attention_layers": [3, 8]}},
            {"architectures": ["LmiMllamaTextForCausalLM"]},
        ),
        (
            "DeciLMForCausalLM",
            {"num_key_value_heads_per_layer": [1, 4, 2]},
            {"architectures": ["LmiDeciLMForCausalLM"], "num_key_value_heads": 4},
        ),
        (
            "QWenLMHeadModel",
            {"intermediate_size": 22016, "num_attention_heads": 32, "seq_length": 2048},
            {
                "architectures": ["LmiQwenForCausalLM"],
                "intermediate_size": 11008,
                "num_key_value_heads": 32,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 2048,
            },
        ),
        (
            "QWenLMHeadModel",
            {"intermediate_size": 22016, "num_attention_heads": 32, "layer_norm_epsilon": 1e-5},
            {
                "architectures": ["LmiQwenForCausalLM"],
                "intermediate_size": 11008,
                "num_key_value_heads": 32,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 8192,
            },
        ),
        (
            "MptForCausalLM",
            MPT | {"layer_norm_epsilon": 1e-6},
            {
                "architectures": ["LmiMptForCausalLM"],
                "n_head": 32,
                "layer_norm_epsilon": 1e-6,
                "apply_residual_connection_post_layernorm": False,
            },
        ),
        (
            "MPTForCausalLM",
            MPT,
            {
                "architectures": ["LmiMptForCausalLM"],
                "n_head": 32,
                "layer_norm_epsilon": 1e-5,
                "apply_residual_connection_post_layernorm": False,
            },
        ),
    ],
)
def test_renamed_families_get_an_own_model_class(
    tmp_path: Path, own: str, fields: dict[str, Any], overrides: dict[str, Any]
) -> None:
    """And what that class reads of a configuration which says it otherwise."""
    assert mapped(tmp_path, own, fields)[0] == overrides


@pytest.mark.parametrize(
    ("own", "fields"),
    [
        pytest.param("BaichuanForCausalLM", {"hidden_size": 5120}, id="13B of no length"),
        pytest.param("BaichuanForCausalLM", SEVEN_B | THIRTEEN_B, id="rotary 13B"),
        pytest.param("BaiChuanForCausalLM", THIRTEEN_B, id="7B's name on 13B"),
        pytest.param("MllamaForConditionalGeneration", {"text_config": {}}, id="Mllama of nothing"),
        pytest.param("DeciLMForCausalLM", {"block_configs": []}, id="native DeciLM"),
        pytest.param("DeciLMForCausalLM", {"num_key_value_heads_per_layer": [4, 3]}, id="3 of 4"),
        pytest.param("DeciLMForCausalLM", {"num_key_value_heads_per_layer": [4, 0]}, id="none"),
        pytest.param("DeciLMForCausalLM", {"num_key_value_heads_per_layer": 4}, id="no list"),
        pytest.param("DeciLMForCausalLM", {"num_key_value_heads_per_layer": [4, "1"]}, id="text"),
        pytest.param("QWenLMHeadModel", {}, id="Qwen that says nothing"),
        pytest.param("QWenLMHeadModel", {"num_attention_heads": 32}, id="Qwen of no width"),
        pytest.param("QWenLMHeadModel", {"intermediate_size": 22016}, id="Qwen of no heads"),
        *(
            pytest.param("MPTForCausalLM", MPT | {"attn_config": {name: value}}, id=f"MPT {name}")
            for name, value in (
                ("alibi_bias_max", 16),
                ("softmax_scale", 0.5),
                ("qk_ln", True),
                ("prefix_lm", True),
            )
        ),
        pytest.param("MPTForCausalLM", MPT | {"n_heads": 0}, id="no heads"),
        pytest.param("MPTForCausalLM", MPT | {"attn_config": {"alibi": False}}, id="no ALiBi"),
        pytest.param("MPTForCausalLM", MPT | {"attn_config": {"clip_qkv": 6}}, id="clipped"),
        pytest.param("MPTForCausalLM", MPT | {"n_heads": 40}, id="uneven slopes"),
        pytest.param("MPTForCausalLM", MPT | {"expansion_ratio": 2}, id="narrow"),
    ],
)
def test_checkpoint_of_another_shape_is_left_to_vllm(
    tmp_path: Path, own: str, fields: dict[str, Any]
) -> None:
    """A class of ours would start and answer wrong; vLLM's error is better."""
    assert mapped(tmp_path, own, fields) == (None, ())


@pytest.mark.parametrize(
    ("head", "served_as"),
    [("Model", "Model"), ("ForMaskedLM", "Model"),
     ("ForSequenceClassification", "ForSequenceClassification")],
)  # fmt: skip
def test_distilbert_is_served_by_our_class(tmp_path: Path, head: str, served_as: str) -> None:
    """Under BERT's names of its fields."""
    fields = {"hidden_dim": 192, "activation": "relu"}
    overrides, (said,) = mapped(tmp_path, f"DistilBert{head}", fields)
    assert overrides == {
        "architectures": [f"LmiDistilBert{served_as}"], "hidden_act": "relu",
        "intermediate_size": 192, "layer_norm_eps": 1e-12, "type_vocab_size": 1,
    }  # fmt: skip
    assert f"DistilBert{head} is served as" in said


def test_other_heads_of_distilbert_are_refused_before_the_fetch(
    tmp_path: Path, explained: ExplainRun
) -> None:
    """VLLM's own text comes once the engine has begun, and names no other model."""
    config = {"architectures": ["DistilBertForTokenClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    [error] = explained("", {"HF_MODEL_ID": str(tmp_path)}).errors
    assert error.startswith("architecture DistilBertForTokenClassification cannot be served")
    assert "DistilBertForSequenceClassification are served here" in error
    chosen = explained("", {"HF_MODEL_ID": str(tmp_path), "OPTION_MODEL_IMPL": "transformers"})
    assert not any("cannot be served" in text for text in chosen.errors)


GTE = {"model_type": "new", "hidden_act": "gelu", "pack_qkv": True, "type_vocab_size": 1}


@pytest.mark.parametrize(
    ("head", "fields", "served_as"),
    [
        ("Model", {}, "GteNewModel"),
        ("Model", {"type_vocab_size": 2}, "GteNewModel"),
        ("Model", {"model_type": "newer"}, None),
        ("Model", {"pack_qkv": False}, None),
        ("Model", {"layer_norm_type": "rms_norm"}, None),
        ("Model", {"logn_attention_scale": True}, None),
        ("ForTokenClassification", {"id2label": {"0": "LABEL_0"}}, "GteNewModel"),
        ("ForTokenClassification", {"id2label": {"0": "B", "1": "I"}}, None),
        ("ForSequenceClassification", {}, "GteNewForSequenceClassification"),
        ("ForSequenceClassification", {"type_vocab_size": 2}, None),
    ],
)  # fmt: skip
def test_gte_v15_is_served_under_vllm_s_name(
    tmp_path: Path, head: str, fields: dict[str, Any], served_as: str | None
) -> None:
    """Where the checkpoint is of the shape that vLLM's class computes; it needs its own code."""
    own = f"New{head}"
    overrides, _ = mapped(tmp_path, own, GTE | fields)
    assert overrides == ({"architectures": [served_as]} if served_as else None)
    model = ModelArtifacts("m", str(tmp_path), str(tmp_path))
    for trusts in (True, False):
        given = EngineArguments({"trust_remote_code": trusts}, {})
        errors = translate_checkpoint(load_settings({}), model, Devices(), given).errors
        is_named = any("needs option.trust_remote_code=true" in text for text in errors)
        assert is_named == (served_as is not None and not trusts)


@pytest.mark.parametrize(
    ("own", "fields"),
    [
        ("FalconForCausalLM", {}), ("GPT2LMHeadModel", {}), ("Phi3VForCausalLM", {}),
        ("MptForCausalLM", {"n_heads": 4}), ("DbrxForCausalLM", {}),
    ],
)  # fmt: skip
def test_adapters_without_lora_layers_are_refused_before_the_fetch(
    tmp_path: Path, explained: ExplainRun, own: str, fields: dict[str, Any]
) -> None:
    """VLLM says it once the weights are loaded; without adapters the model is served."""
    config = {"architectures": [own], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    environ = {"HF_MODEL_ID": str(tmp_path)}
    [error] = explained("", environ | {"OPTION_ENABLE_LORA": "true"}).errors
    assert "enable_lora (OPTION_ENABLE_LORA)" in error
    assert f"no LoRA layers for {own}" in error
    assert explained("", environ).errors == []
    for other in ({"OPTION_MODEL_IMPL": "transformers"}, {"OPTION_HF_OVERRIDES": OTHER_CLASS}):
        chosen = explained("", environ | {"OPTION_ENABLE_LORA": "true"} | other)
        assert not any("LoRA layers" in text for text in chosen.errors)


@pytest.mark.parametrize("named", ['["GPT2LMHeadModel"]', "[]", "5", '"x"', "[{}]", "null"])
def test_overrides_of_a_model_without_a_configuration(explained: ExplainRun, named: str) -> None:
    """Whatever they hold, what vLLM would look up is judged; the rest is vLLM's to refuse."""
    environ = {"OPTION_ENABLE_LORA": "true", "HF_MODEL_ID": "acme/m"}
    run = explained("", environ | {"OPTION_HF_OVERRIDES": f'{{"architectures": {named}}}'})
    assert any("LoRA layers" in text for text in run.errors) == ("GPT2" in named)


@pytest.mark.parametrize("own", ["LlamaForCausalLM", "BaichuanForCausalLM", "Unheard"])
def test_other_architectures_are_left_alone(tmp_path: Path, own: str) -> None:
    """Native ones, and those with tensors of another layout."""
    assert mapped(tmp_path, own) == (None, ())


def test_explain_shows_the_mapping_of_a_local_checkpoint(
    tmp_path: Path, explained: ExplainRun
) -> None:
    """The argument, and the one warning."""
    config = {
        "architectures": ["MllamaForConditionalGeneration"],
        "text_config": {"cross_attention_layers": [1]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run = explained("", {"HF_MODEL_ID": str(tmp_path)})
    assert run.engine_args["hf_overrides"] == {"architectures": ["LmiMllamaTextForCausalLM"]}
    said = [text for text in run.warnings if "LmiMllamaTextForCausalLM" in text]
    assert len(said) == 1
    assert "text only, pictures are refused" in said[0]
