"""Which files of a repository are fetched: tables of names, no network."""

import pytest

from lmi_vllm.features.hub.files import select_files

BOTH = ["config.json", "model.safetensors", "pytorch_model.bin", "training_args.bin"]
MISTRAL = ["config.json", "params.json", "consolidated.safetensors", "model-1.safetensors"]
SENTENCE = ["config.json", "model.safetensors", "1_Pooling/config.json",
            "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"]  # fmt: skip

CASES = [
    pytest.param(BOTH, None, ["model.safetensors"], id="safetensors-first"),
    pytest.param(BOTH, "pt", [], id="pt-asked-but-absent"),
    pytest.param(BOTH, "npcache", ["pytorch_model.bin"], id="npcache-reads-bin"),
    pytest.param(BOTH, "dummy", [], id="dummy-needs-none"),
    pytest.param(BOTH[:1] + BOTH[2:], None, ["pytorch_model.bin"], id="bin-if-nothing-else"),
    pytest.param(MISTRAL, None, ["model-1.safetensors"], id="hf-before-consolidated"),
    pytest.param(MISTRAL, "mistral", ["consolidated.safetensors"], id="mistral-asked"),
    pytest.param(MISTRAL[1:3], None, ["consolidated.safetensors"], id="only-consolidated"),
    pytest.param(
        SENTENCE, None, ["2_Dense/model.safetensors", "model.safetensors"], id="module-weights"
    ),
    pytest.param(["onnx/model.bin", "a.gguf"], None, [], id="foreign-formats"),
    pytest.param(["a.gguf"], "gguf", ["a.gguf"], id="gguf-asked"),
    pytest.param(["sub/model.safetensors"], None, ["sub/model.safetensors"], id="only-nested"),
    pytest.param(
        ["model.safetensors", "fp16/model.safetensors"], None, ["model.safetensors"], id="variants"
    ),
    pytest.param(BOTH, "my_loader", ["model.safetensors", "pytorch_model.bin"], id="plugin-loader"),
    pytest.param(
        ["adapter_config.json", "adapter_model.bin"], None, ["adapter_model.bin"], id="adapter"
    ),
]


@pytest.mark.parametrize(("names", "load_format", "weights"), CASES)
def test_one_weight_format_is_chosen(
    names: list[str], load_format: str | None, weights: list[str]
) -> None:
    """Exactly the first format of the order that the load format stands for."""
    assert list(select_files(names, load_format, None).weights) == weights


def test_support_files_are_kept_and_others_left() -> None:
    """Tokenizer, template and code come along; papers, pictures and hidden files do not."""
    wanted = ["chat_template.jinja", "merges.txt", "modeling.py", "qwen.tiktoken", "spiece.model"]
    unwanted = ["README.md", "a.png", ".gitattributes", "onnx/config.json", "flax_model.msgpack"]
    assert list(select_files(wanted + unwanted, None, None).files) == wanted


@pytest.mark.parametrize("name", ["tokenizer.model.v3", "tokenizer.model.v7m1", "tekken.json"])
def test_mistral_s_own_tokenizer_comes_along(name: str) -> None:
    """`tokenizer_mode=mistral` needs it, whichever weights are fetched."""
    assert name in select_files([*MISTRAL, name], None, None).files


def test_mistral_config_stays_away_from_hf_weights() -> None:
    """`params.json` beside Hugging Face weights would make vLLM look for consolidated ones."""
    assert "params.json" not in select_files(MISTRAL, None, None).files
    assert "params.json" in select_files(MISTRAL, "mistral", None).files


def test_ignore_patterns_replace_the_default() -> None:
    """The user's patterns decide alone, also about original/."""
    names = ["model.safetensors", "original/params.json", "extra.json"]
    assert select_files(names, None, None).files == ("extra.json", "model.safetensors")
    chosen = select_files(names, None, ["extra*"]).files
    assert chosen == ("model.safetensors", "original/params.json")
