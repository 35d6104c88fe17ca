"""LMI's sample configurations of its Rust and OnnxRuntime engines, and what vLLM cannot do."""

import json
from pathlib import Path

import pytest

from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.features.legacy_models import MODEL_CLASSES
from tests.unit.conftest import ExplainRun

EMBEDS: dict[str, object] = {"runner": "auto", "convert": "embed"}
RANKS: dict[str, object] = {"runner": "pooling", "convert": "classify"}
CLS: dict[str, object] = {"pooling_type": "CLS", "use_activation": False}
OWN: dict[str, object] = {"use_activation": False}
# What the config.json of a sample's model names, where it is not BertModel.
CLASSES = {
    "sentence-camembert-large-rust": "CamembertModel",
    "roberta-base-rust": "RobertaModel",
    "msmarco-distilbert-base-v4-rust": "DistilBertModel",
    "bge-reranker-rust": "XLMRobertaForSequenceClassification",
    "e5-mistral-7b-rust": "MistralModel",
    "gte-qwen2-7b-rust": "Qwen2ForCausalLM",
    "gte-large-rust": "NewModel",
    "bge-multilingual-gemma2-rust": "Gemma2Model",
}
# LMI's samples: name, engine, model, lines, task, pooler_config.
SAMPLES = (
    ("bge-base-rust", "Rust", "BAAI/bge-base-en-v1.5", (), EMBEDS, OWN),
    ("e5-base-v2-rust", "Rust", "intfloat/e5-base-v2", ("pooling=cls",), EMBEDS, CLS),
    ("sentence-camembert-large-rust", "Rust", "dangvantuan/sentence-camembert-large",
     ("pooling=cls",), EMBEDS, CLS),
    ("roberta-base-rust", "Rust", "relbert/relbert-roberta-base-nce-conceptnet",
     ("pooling=cls",), EMBEDS, CLS),
    ("msmarco-distilbert-base-v4-rust", "Rust", "sentence-transformers/msmarco-distilbert-base-v4",
     ("pooling=cls",), EMBEDS, CLS),
    ("bge-reranker-rust", "Rust", "BAAI/bge-reranker-base", ("reranking=True",), RANKS, None),
    ("e5-mistral-7b-rust", "Rust", "intfloat/e5-mistral-7b-instruct", ("pooling=cls",), EMBEDS,
     CLS),
    ("gte-qwen2-7b-rust", "Rust", "Alibaba-NLP/gte-Qwen2-7B-instruct", ("pooling=cls",), EMBEDS,
     CLS),
    ("gte-large-rust", "Rust", "Alibaba-NLP/gte-large-en-v1.5",
     ("option.trust_remote_code=true", "pooling=cls"), EMBEDS, CLS),
    ("bge-multilingual-gemma2-rust", "Rust", "BAAI/bge-multilingual-gemma2", ("pooling=cls",),
     EMBEDS, CLS),
    ("bge-base-onnx", "OnnxRuntime", "BAAI/bge-base-en-v1.5", (), EMBEDS, OWN),
)  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda each: str(each[0]))
def test_sample_of_lmi_starts_with_one_warning(
    sample: tuple[str, str, str, tuple[str, ...], dict[str, object], object],
    explained: ExplainRun,
) -> None:
    """The engine is named; beside it only that a model's own code is not pinned."""
    name, engine, model, lines, task, pooler = sample
    every = (f"engine={engine}", f"option.model_id={model}", *lines, "batch_size=8",
             "option.task=text_embedding", "normalize=False")  # fmt: skip
    run = explained("\n".join(every), {}, "--offline")
    assert run.errors == []
    about_code = [text for text in run.warnings if "trust_remote_code" in text]
    assert len(about_code) == (name == "gte-large-rust")
    [warning] = [text for text in run.warnings if text not in about_code]
    assert warning.startswith("engine ")
    assert engine in warning
    assert run.engine_args["model"] == model
    assert {argument: run.engine_args[argument] for argument in task} == task
    assert run.engine_args.get("pooler_config") == pooler
    assert run.option("normalize")["value"] is False


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda each: str(each[0]))
def test_class_of_a_sample_s_model_is_served(
    sample: tuple[str, str, str, tuple[str, ...], dict[str, object], object],
    tmp_path: Path,
    explained: ExplainRun,
) -> None:
    """`--offline` knows no config.json: what it names is a class of vLLM's, or mapped to one."""
    name, engine, _, lines, _, _ = sample
    own = CLASSES.get(name, "BertModel")
    config = {"architectures": [own]} | ({"model_type": "new"} if own == "NewModel" else {})
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run = explained("\n".join((f"engine={engine}", f"option.model_id={tmp_path}", *lines)))
    assert run.errors == []
    overrides = run.engine_args.get("hf_overrides", {"architectures": [own]})
    [served] = overrides["architectures"]
    assert served in {*load_release().architectures, *MODEL_CLASSES}


@pytest.mark.parametrize("line", ["engine=Rust", "option.engine=OnnxRuntime", "engine=pytorch"])
def test_engine_of_texts_pools_unless_a_task_says_not(line: str, explained: ExplainRun) -> None:
    """Whatever class the model has."""
    run = explained(f"{line}\noption.model_id=BAAI/bge-base-en-v1.5")
    assert (run.engine_args["runner"], run.engine_args["convert"]) == ("pooling", "auto")
    run = explained(f"{line}\noption.model_id=a/b\noption.task=text-generation")
    assert run.engine_args["runner"] == "generate"


def test_model_of_djl_s_zoo_is_one_of_texts(explained: ExplainRun) -> None:
    """Its address is enough, as in LMI's guide; an engine or a task that is set wins."""
    model = "djl://ai.djl.huggingface.onnxruntime/BAAI/bge-base-en-v1.5"
    zoo = {"HF_MODEL_ID": model, "SERVING_MIN_WORKERS": "1"}
    run = explained("", zoo)
    assert (run.errors, run.warnings) == ([], [])
    assert run.engine_args["model"] == "BAAI/bge-base-en-v1.5"
    assert run.engine_args["runner"] == "pooling"
    listed = explained("", {}, "-m", f"bge={model}")
    assert listed.engine_args["model"] == "BAAI/bge-base-en-v1.5"
    assert listed.engine_args["runner"] == "pooling"
    assert explained("", zoo | {"OPTION_ENGINE": "Python"}).engine_args["runner"] == "auto"
    assert explained("", zoo | {"OPTION_TASK": "generate"}).engine_args["runner"] == "generate"


@pytest.mark.parametrize(
    ("line", "pooling"),
    [("pooling=mean", "MEAN"), ("option.pooling=mean_tokens", "MEAN"),
     ("pooling=lasttoken", "LAST"), ("pooling=cls_token", "CLS")],
)  # fmt: skip
def test_pooling_is_vllm_s(line: str, pooling: str, explained: ExplainRun) -> None:
    """Both of LMI's spellings, with and without a prefix; what is not set, the model says."""
    run = explained(f"engine=Rust\noption.model_id=a/b\n{line}", {}, "--offline")
    assert run.errors == []
    assert run.engine_args["pooler_config"] == {"pooling_type": pooling}


def test_arguments_may_be_variables(explained: ExplainRun) -> None:
    """As in LMI, in any case of letters; the file wins, and an unknown name is reported."""
    environ = {"ARGS_POOLING": "cls", "ARGS_MAXLENGTH": "64", "ARGS_truncation": "true",
               "ARGS_NORMALIZE": "false", "ARGS_POLING": "cls", "ARGS_SPARSE": ""}  # fmt: skip
    run = explained("engine=Rust\noption.model_id=a/b\noption.task=text_embedding", environ)
    assert run.errors == []
    assert run.engine_args["pooler_config"] == CLS
    assert (run.option("maxLength")["value"], run.option("truncation")["value"]) == (64, "true")
    [unknown] = [text for text in run.warnings if "ARGS_" in text]
    assert unknown.startswith("ARGS_POLING is not known")
    assert "ARGS_POOLING" in unknown
    run = explained("engine=Rust\noption.model_id=a/b\npooling=mean", environ, "--strict")
    assert run.engine_args["pooler_config"]["pooling_type"] == "MEAN"
    assert "ARGS_POLING" in run.errors[0]
    run = explained("option.model_id=a/b\noption.task=text-generation", {"ARGS_POOLING": "cls"})
    assert run.warnings[0].startswith("pooling (ARGS_POOLING) has no effect")
    run = explained("engine=Rust\noption.model_id=a/b", {"ARGS_POOLING": "max"})
    assert "ARGS_POOLING" in run.errors[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [("pooling=max", "cls, mean or lasttoken"), ("pooling=weightedmean", "pooling"),
     ("pooling=mean_sqrt_len", "pooling"), ("sparse=true", "sparse"),
     ("layerNorm=a.pt", "layerNorm"), ("maxLength=0", "maxLength")],
)  # fmt: skip
def test_options_without_vllm_counterpart_are_refused_by_name(
    line: str, words: str, explained: ExplainRun
) -> None:
    """A vector that is pooled in another way would be answered with 200, and be wrong."""
    run = explained(f"engine=Rust\noption.model_id=a/b\n{line}", {}, "--offline")
    [error] = run.errors
    assert line.partition("=")[0] in error
    assert words in error


def test_option_without_mapping_needs_no_warning(explained: ExplainRun) -> None:
    """VLLM tokenizes and batches by itself; explicit arguments win over LMI's."""
    lines = ("engine=OnnxRuntime", "option.model_id=a/b", "padding=true", "batchifier=stack",
             "includeTokenTypes=true", "int32=true", "sparse=false", "dense=2_Dense/x.safetensors",
             "denseActivation=Tanh", "truncation=true", "maxLength=128", "reranking=true",
             "option.runner=auto", "option.convert=none")  # fmt: skip
    run = explained("\n".join(lines), {}, "--offline")
    assert (run.errors, len(run.warnings)) == ([], 1)
    assert (run.engine_args["runner"], run.engine_args["convert"]) == ("auto", "none")
    run = explained('pooling=cls\noption.pooler_config={"pooling_type": "LAST"}')
    assert "pooling" in run.warnings[0]
    assert run.engine_args["pooler_config"] == {"pooling_type": "LAST"}


@pytest.mark.parametrize(("truncation", "warned"), [("truncation=true\n", False), ("", True)])
def test_max_length_without_truncation_is_reported(
    explained: ExplainRun, truncation: str, *, warned: bool
) -> None:
    """A text is cut where truncation asks for it, and there only."""
    run = explained(f"option.model_id=a/b\n{truncation}maxLength=128", {}, "--offline")
    found = [text for text in run.warnings if "maxLength" in text]
    assert bool(found) is warned
    assert all("without truncation=true" in text for text in found)


@pytest.mark.parametrize(
    ("lines", "label", "reason"),
    [
        (("option.task=text-generation", "truncation=true"), "truncation", "generate text"),
        (("option.task=text-generation", "pooling=cls"), "pooling", "generate text"),
        (("reranking=true", "pooling=cls"), "pooling", "ranks or classifies"),
        (("reranking=true", "normalize=true"), "normalize", "ranks or classifies"),
        (("option.task=text-embedding", "sigmoid=false"), "sigmoid", "embeds"),
        (("option.task=text-embedding", "normalize=false", "option.normalize=true"),
         "normalize=false", "option.normalize=true"),
    ],
)  # fmt: skip
def test_options_without_use_for_the_task_are_named(
    lines: tuple[str, ...], label: str, reason: str, explained: ExplainRun
) -> None:
    """Nothing is read and then ignored: the warning says the option, its line and why."""
    run = explained("\n".join(("option.model_id=a/b", *lines)), {}, "--offline")
    assert run.errors == []
    [warning] = run.warnings
    assert warning.startswith(label)
    assert "line" in warning
    assert reason in warning


@pytest.mark.parametrize(
    ("lines", "pooler", "warned"),
    [
        (("normalize=false",), OWN, None),
        (("pooling=cls", "normalize=false"), CLS, None),
        (("normalize=false", 'option.pooler_config={"pooling_type": "CLS"}'), CLS, None),
        (("pooling=mean", 'option.pooler_config={"use_activation": false}'),
         {"pooling_type": "MEAN", "use_activation": False}, None),
        (("normalize=false", 'option.pooler_config={"use_activation": true}'),
         {"use_activation": True}, "normalize"),
        (("pooling=cls", 'option.pooler_config={"pooling_type": "LAST"}'),
         {"pooling_type": "LAST"}, "pooling"),
        (("pooling=cls", 'option.pooler_config={"pooling_type": "CLS"}'),
         {"pooling_type": "CLS"}, None),
    ],
)  # fmt: skip
def test_explicit_pooler_config_is_completed(
    lines: tuple[str, ...], pooler: object, warned: str | None, explained: ExplainRun
) -> None:
    """What it does not say is taken from `pooling` and `normalize`, on every engine of LMI's."""
    every = ("option.model_id=a/b", "option.task=text-embedding", *lines)
    run = explained("\n".join(every), {}, "--offline")
    assert (run.errors, run.engine_args["pooler_config"]) == ([], pooler)
    assert [text.partition(" ")[0] for text in run.warnings] == ([warned] if warned else [])
