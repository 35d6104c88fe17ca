"""The shipped demo model: complete, small, and consistent, checked without torch or vLLM."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR

SIZE_LIMIT_BYTES = 6 * 1024 * 1024
ADAPTERS = ("capitals", "json")
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>")
PEFT_PREFIX = "base_model.model."
TEXTS = (
    "The moon is a ball of grey rock.",
    "  spaces,\ttabs\nand\r\nlines  ",
    '{"answer": "yes"}',
    "naïve café - 東京 - привет - 🌙👩‍🚀",
    "\x00\x7f\u200b",
    "0123456789" * 20,
)


def read_json(*parts: str) -> Any:
    """Return the parsed JSON file below the model's folder."""
    return json.loads(DEMO_MODEL_DIR.joinpath(*parts).read_text(encoding="utf-8"))


def read_tensors(path: Path) -> dict[str, Any]:
    """Return a safetensors file's header by tensor name, checked against the file's size."""
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    data_end = max(tensor["data_offsets"][1] for tensor in header.values())
    assert path.stat().st_size == 8 + header_bytes + data_end
    return header


def read_properties() -> dict[str, str]:
    """Return serving.properties without its comments."""
    lines = (DEMO_MODEL_DIR / "serving.properties").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key: value for key, _, value in pairs}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return the shipped tokenizer, without transformers."""
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))


def test_model_folder_fits_in_the_package() -> None:
    """The wheel carries the folder, so it stays below six megabytes."""
    sizes = [path.stat().st_size for path in DEMO_MODEL_DIR.rglob("*") if path.is_file()]
    assert sum(sizes) <= SIZE_LIMIT_BYTES


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "serving.properties",
        "tokenizer.json",
        "tokenizer_config.json",
        *(f"adapters/{adapter}/adapter_config.json" for adapter in ADAPTERS),
        *(f"adapters/{adapter}/adapter_model.safetensors" for adapter in ADAPTERS),
    ],
)
def test_model_folder_holds_file(name: str) -> None:
    """Every file that a server reads is there and is not empty."""
    assert (DEMO_MODEL_DIR / name).stat().st_size > 0


def test_config_describes_a_float32_llama() -> None:
    """The engine picks its model class and its precision from these fields."""
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] == 2048
    assert config["tie_word_embeddings"] is True


def test_config_heads_suit_the_cpu_attention_kernel() -> None:
    """The CPU attention kernel of vLLM refuses heads of 16 values."""
    config = read_json("config.json")
    assert config["head_dim"] >= 32
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_config_needs_no_code_from_the_folder() -> None:
    """The model and its tokenizer load without trust_remote_code."""
    assert "auto_map" not in read_json("config.json")
    assert "auto_map" not in read_json("tokenizer_config.json")
    assert not list(DEMO_MODEL_DIR.rglob("*.py"))


def test_weights_match_the_config() -> None:
    """The weights are float32, and their shapes are those that the configuration names."""
    config = read_json("config.json")
    tensors = read_tensors(DEMO_MODEL_DIR / "model.safetensors")
    assert {tensor["dtype"] for tensor in tensors.values()} == {"F32"}
    embeddings = tensors["model.embed_tokens.weight"]
    assert embeddings["shape"] == [config["vocab_size"], config["hidden_size"]]
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    assert len(layers) == config["num_hidden_layers"]


def test_special_token_ids_agree_everywhere(tokenizer: Any) -> None:
    """The configuration files and the tokenizer mean the same ids."""
    for name in ("config.json", "generation_config.json"):
        config = read_json(name)
        for field, token in (("bos", "<s>"), ("eos", "</s>"), ("pad", "<pad>")):
            assert config[f"{field}_token_id"] == tokenizer.token_to_id(token)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_config_names_the_base_and_a_plain_lora(adapter: str) -> None:
    """The adapter is an ordinary LoRA of the demo model, within the engine's default rank."""
    config = read_json("adapters", adapter, "adapter_config.json")
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "lmi_vllm/demo"
    assert config["bias"] == "none"
    assert config["r"] <= 16


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_tensors_fit_rank_targets_and_base(adapter: str) -> None:
    """Each target projection of the base has one pair of tensors, of the configured rank."""
    config = read_json("adapters", adapter, "adapter_config.json")
    tensors = read_tensors(DEMO_MODEL_DIR / "adapters" / adapter / "adapter_model.safetensors")
    expected = {}
    for name, tensor in read_tensors(DEMO_MODEL_DIR / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in config["target_modules"]:
            rows, columns = tensor["shape"]
            expected[f"{PEFT_PREFIX}{module}.lora_A.weight"] = [config["r"], columns]
            expected[f"{PEFT_PREFIX}{module}.lora_B.weight"] = [rows, config["r"]]
    assert expected
    assert {name: tensor["shape"] for name, tensor in tensors.items()} == expected


def test_adapters_differ_from_each_other() -> None:
    """The two adapters are not the same weights under two names."""
    capitals, json_ = (
        (DEMO_MODEL_DIR / "adapters" / name / "adapter_model.safetensors").read_bytes()
        for name in ADAPTERS
    )
    assert capitals != json_


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    """Byte-level tokens give every text back unchanged."""
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text


def test_tokenizer_starts_a_prompt_with_bos(tokenizer: Any) -> None:
    """A plain prompt opens with <s>, once."""
    ids = tokenizer.encode("Hello").ids
    assert ids.count(tokenizer.token_to_id("<s>")) == 1
    assert ids[0] == tokenizer.token_to_id("<s>")


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_tokenizer_keeps_special_token_whole(tokenizer: Any, token: str) -> None:
    """The chat template writes these as text, so each must become one id."""
    ids = tokenizer.encode(token, add_special_tokens=False).ids
    assert ids == [tokenizer.token_to_id(token)]


def test_tokenizer_config_uses_the_common_class() -> None:
    """Every transformers version that the engine allows knows this class."""
    config = read_json("tokenizer_config.json")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_max_length"] == read_json("config.json")["max_position_embeddings"]


def test_chat_template_marks_every_role() -> None:
    """A conversation becomes one turn per message and ends where the answer starts."""
    jinja2 = pytest.importorskip("jinja2")
    source = (DEMO_MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    roles = ("system", "user", "assistant", "user")
    rendered = jinja2.Template(source).render(
        messages=[{"role": role, "content": f" {role}! "} for role in roles],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert rendered == (
        "<s><|system|>system!</s><|user|>user!</s><|assistant|>assistant!</s>"
        "<|user|>user!</s><|assistant|>"
    )


def test_serving_properties_keep_the_engine_small() -> None:
    """The options let a laptop serve the base and both adapters at once."""
    properties = read_properties()
    assert properties["option.dtype"] == "fp32"
    assert properties["option.enable_lora"] == "true"
    assert int(properties["option.max_loras"]) >= len(ADAPTERS)
    assert int(properties["option.kv_cache_memory_bytes"]) <= 1 << 28
    assert "option.served_model_name" not in properties


def test_kv_cache_holds_every_conversation_at_full_length() -> None:
    """The comment in serving.properties about the cache's size is true."""
    config, properties = read_json("config.json"), read_properties()
    values = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    bytes_per_token = 2 * values * 4  # a key and a value, in float32
    tokens = int(properties["option.max_rolling_batch_size"]) * config["max_position_embeddings"]
    assert tokens * bytes_per_token <= int(properties["option.kv_cache_memory_bytes"])
