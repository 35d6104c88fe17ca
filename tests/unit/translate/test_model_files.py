"""Arguments and messages that follow from the files in the model's folder."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi_vllm.translate.arguments import Translation
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate_start

PLAIN = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
LONGROPE = {
    "model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": {"type": "longrope"},
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DYNAMIC = {
    "max_position_embeddings": 32768, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip
NOMIC = {"model_type": "nomic_bert", "max_trained_positions": 2048, "n_positions": 8192}
SCALED = {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}


def translated(
    folder: Path, config: Mapping[str, object], files: tuple[str, ...] = (), **options: str
) -> Translation:
    """What a start would do with this model."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in files:
        (folder / name).write_text("{}", encoding="utf-8")
    environ = {"HF_MODEL_ID": str(folder)}
    environ |= {f"OPTION_{name.upper()}": value for name, value in options.items()}
    return translate_start(load_settings(environ), environ, Devices())


@pytest.mark.parametrize(
    ("files", "mode"),
    [
        (("tekken.json",), "mistral"),
        (("tekken.json", "params.json", "tokenizer_config.json"), "mistral"),
        (("tokenizer.model.v3",), "mistral"),
        (("tokenizer.model.v11m1", "config.txt"), "mistral"),
        (("tekken.json", "tokenizer.json"), "auto"),
        (("tokenizer.model.v3", "tokenizer.model"), "auto"),
        (("tokenizer.json",), "auto"),
    ],
)
def test_a_tokenizer_that_only_mistral_reads_is_read_so(
    tmp_path: Path, files: tuple[str, ...], mode: str
) -> None:
    """Whatever the layout of the weights."""
    found = translated(tmp_path, PLAIN, files).arguments
    assert (found.values.get("tokenizer_mode") or "auto") == mode
    if mode == "mistral":
        assert files[0] in str(found.origin_of("tokenizer_mode"))


def test_mode_that_is_set_counts(tmp_path: Path) -> None:
    """The user may want Transformers' own reading."""
    found = translated(tmp_path, PLAIN, ("tekken.json",), tokenizer_mode="hf")
    assert found.arguments.values["tokenizer_mode"] == "hf"


def test_tokenizer_of_another_folder_decides(tmp_path: Path) -> None:
    """The model's own files have no say then."""
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tekken.json").write_text("{}", encoding="utf-8")
    found = translated(tmp_path, PLAIN, ("tokenizer.json",), tokenizer=str(other))
    assert found.arguments.values["tokenizer_mode"] == "mistral"


def test_longrope_names_both_lengths(tmp_path: Path) -> None:
    """4,096 without a message where the model takes 131,072 would be a surprise."""
    (said,) = (text for text in translated(tmp_path, LONGROPE).warnings if "longrope" in text)
    assert "4096" in said
    assert "131072" in said
    set_by_hand = translated(tmp_path, LONGROPE, max_model_len="131072")
    assert not [text for text in set_by_hand.warnings if "longrope" in text]


@pytest.mark.parametrize("asked", [{}, {"max_model_len": "60000"}])
def test_dynamic_scaling_is_warned_of(tmp_path: Path, asked: dict[str, str]) -> None:
    """The engine serves what it has values for."""
    said = [text for text in translated(tmp_path, DYNAMIC, **asked).warnings if "dynamic" in text]
    assert len(said) == 1
    assert said[0].startswith("max_model_len is 32768 and not ")


@pytest.mark.parametrize(
    ("config", "asked"), [(DYNAMIC, {"max_model_len": "32768"}), (SCALED, {}), (PLAIN, {})]
)
def test_lengths_that_are_served_are_not_warned_of(
    tmp_path: Path, config: Mapping[str, object], asked: dict[str, str]
) -> None:
    """Nothing is to say of them."""
    assert not [text for text in translated(tmp_path, config, **asked).warnings if "len" in text]


@pytest.mark.parametrize(("asked", "is_refused"), [("512", True), ("2048", False), ("-1", False)])
def test_nomic_is_not_served_below_its_trained_length(
    tmp_path: Path, asked: str, is_refused: bool
) -> None:
    """Its vectors would be wrong."""
    errors = translated(tmp_path, NOMIC, max_model_len=asked).errors
    assert (
        bool([text for text in errors if "max_model_len" in text and "2048" in text]) == is_refused
    )


def weights(folder: Path, *names: str) -> None:
    """Write a safetensors file with tensors of these names."""
    header = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [place, place + 1]}
        for place, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(len(names))
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("names", "config", "is_refused"),
    [
        (("model.norm.weight", "lm_head.weight"), PLAIN, True),
        (("encoder.layer.0.weight", "pooler.dense.weight"), {"architectures": ["BertModel"]}, True),
        (("model.norm.weight", "score.weight"), PLAIN, False),
        (("roberta.x.weight", "classifier.out_proj.weight"), {"architectures": ["X"]}, False),
        (("model.norm.weight",), PLAIN | {"is_original_qwen3_reranker": True}, False),
        (("encoder.weight",), {"architectures": ["BertForSequenceClassification"]}, False),
        ((), PLAIN, False),
    ],
)
def test_no_scores_are_invented(
    tmp_path: Path, names: tuple[str, ...], config: Mapping[str, object], *, is_refused: bool
) -> None:
    """A head that is not among the weights would be random."""
    if names:
        weights(tmp_path, *names)
    errors = translated(tmp_path, config, task="classify").errors
    assert bool([text for text in errors if "no head" in text]) == is_refused


def test_reranking_on_a_model_that_embeds_is_one_plain_sentence(tmp_path: Path) -> None:
    """It names the option that asked for it."""
    weights(tmp_path, "encoder.layer.0.weight")
    properties = tmp_path / "serving.properties"
    properties.write_text("engine=Rust\nreranking=true\n", encoding="utf-8")
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}', encoding="utf-8")
    environ = {"SERVING_MODEL_STORE": str(tmp_path), "HF_MODEL_ID": str(tmp_path)}
    errors = translate_start(load_settings(environ), environ, Devices()).errors
    assert [text for text in errors if "serving.properties line 2" in text and "no head" in text]


def test_gguf_alone_is_refused(tmp_path: Path) -> None:
    """VLLM would say so after it was imported, and not what to do."""
    (tmp_path / "model.Q4_K_M.gguf").touch()
    (error,) = (text for text in translated(tmp_path, PLAIN).errors if "GGUF" in text)
    assert "HF_MODEL_ID" in error
    weights(tmp_path, "model.norm.weight")
    assert not [text for text in translated(tmp_path, PLAIN).errors if "GGUF" in text]


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, "is no model: it has no config.json"),
        ({"model.safetensors": ""}, "is no model: it has no config.json"),
        ({"inner/config.json": "{}"}, "its folder inner has one: name {folder}/inner"),
        ({"config.json": '{"a":'}, "config.json cannot be read: Expecting value"),
        ({"config.json": "[]"}, "config.json is no JSON object"),
        ({"params.json": "{}"}, ""),
        ({"model.py": ""}, ""),
    ],
)
def test_folder_that_is_no_model_is_refused(
    tmp_path: Path, files: dict[str, str], error: str
) -> None:
    """Before vLLM is imported; the error names the setting and what lies there."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    environ = {"HF_MODEL_ID": str(tmp_path)}
    errors = translate_start(load_settings(environ), environ, Devices()).errors
    found = [text for text in errors if "model (HF_MODEL_ID)" in text and str(tmp_path) in text]
    assert bool(found) is bool(error)
    assert error.format(folder=tmp_path) in "".join(found)


def test_code_beside_the_weights_may_read_what_is_no_model(tmp_path: Path) -> None:
    """The store has model.py, and the model id names a folder of data."""
    store, data = tmp_path / "store", tmp_path / "data"
    store.mkdir()
    data.mkdir()
    (store / "model.py").touch()
    (store / "serving.properties").write_text(f"option.model_id={data}", encoding="utf-8")
    environ = {"SERVING_MODEL_STORE": str(store)}
    errors = translate_start(load_settings(environ), environ, Devices()).errors
    assert not [text for text in errors if "is no model" in text]


@pytest.mark.parametrize(
    ("files", "options", "is_refused"),
    [
        (("model.safetensors",), {}, True),
        (("model.safetensors", "generation_config.json"), {}, True),
        (("model.safetensors", "tokenizer.json"), {}, False),
        (("model.safetensors", "vocab.txt"), {}, False),
        (("model.safetensors", "qwen.tiktoken"), {}, False),
        (("model.safetensors", "spiece.model"), {}, False),
        (("model.safetensors",), {"tokenizer": "acme/other"}, False),
        (("model.safetensors",), {"skip_tokenizer_init": "true"}, False),
        ((), {}, False),
    ],
)
def test_model_without_a_tokenizer_is_refused(
    tmp_path: Path, files: tuple[str, ...], options: dict[str, str], is_refused: bool
) -> None:
    """Before the engine, which needs a quarter of a minute to find out."""
    found = translated(tmp_path, PLAIN, files, **options)
    said = [text for text in found.errors if text.startswith("the model's tokenizer: ")]
    assert bool(said) is is_refused, said


KINDS = {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding": {}}
LONG = (  # config, files, max_model_len, the model's own length where it is refused
    (PLAIN, (), "32769", "32768"),
    (PLAIN, (), "32768", ""),
    (PLAIN, (), "-1", ""),
    (SCALED, (), "16385", "16384"),
    (SCALED, (), "16384", ""),
    ({**PLAIN, "rope_parameters": KINDS}, (), "65537", "65536"),
    ({**PLAIN, "rope_parameters": KINDS}, (), "65536", ""),
    ({"text_config": PLAIN}, (), "32769", "32768"),
    ({**PLAIN, "model_max_length": 65536}, (), "65536", ""),
    ({"architectures": ["Unsaid"]}, (), "65536", ""),
    (PLAIN, ("params.json",), "65536", ""),
    (PLAIN, ("sentence_bert_config.json",), "65536", ""),
    (NOMIC, (), "16384", ""),
)


@pytest.mark.parametrize(("config", "files", "asked", "own"), LONG)
def test_a_length_above_the_models_own_ends_the_start(
    tmp_path: Path, config: Mapping[str, object], files: tuple[str, ...], asked: str, own: str
) -> None:
    """Before vLLM is imported; but where vLLM would take it, it goes on."""
    found = translated(tmp_path, config, files, max_model_len=asked)
    said = [text for text in found.errors if "own length" in text]
    assert len(said) == bool(own)
    assert all(f"(OPTION_MAX_MODEL_LEN): {asked} is above {own}," in text for text in said)


def test_overrides_lengthen_the_model_and_the_variable_makes_a_warning(tmp_path: Path) -> None:
    """The two ways that the message names."""
    scaled = json.dumps({"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    longer = translated(tmp_path, PLAIN, max_model_len="65536", hf_overrides=scaled)
    assert not longer.errors
    allowed = translated(
        tmp_path, PLAIN, max_model_len="65536", env="VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    )
    assert not allowed.errors
    assert [text for text in allowed.warnings if "own length" in text]
