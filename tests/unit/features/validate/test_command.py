"""`validate`: settings against config.json, and a memory estimate that says it is one."""

import argparse
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.features.validate import command as validate
from lmi_vllm.features.validate.memory_estimate import GIB, estimate_memory
from lmi_vllm.features.validate.model_checks import check_model, served_architectures
from lmi_vllm.features.validate.model_shape import read_shape
from tests.support.assembled import CONFIGURATION
from tests.support.s3_server import BUCKET, S3Server

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
}  # fmt: skip
WEIGHTS_8B = 16_060_522_496  # bytes of that shape: 8.03e9 numbers of two bytes

Validate = Callable[..., tuple[int, Mapping[str, Any]]]


@pytest.fixture
def validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Validate:
    """Run `validate --format json` over a model directory with `config`."""

    def run(
        config: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None, *flags: str
    ) -> tuple[int, Mapping[str, Any]]:
        if config is None:
            (tmp_path / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
        else:
            (tmp_path / "config.json").write_text(json.dumps(config))
        parser = argparse.ArgumentParser()
        validate.add_arguments(parser, CONFIGURATION)
        given = ["--format", "json", "--model-store", str(tmp_path), *flags]
        given += [] if "--gpus" in flags else ["--gpus", "1"]
        code = validate.run(parser.parse_args(given), environ or {}, CONFIGURATION)
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("text", ["1", "TRUE"])
def test_longer_context_is_a_warning_where_vllm_takes_it(validated: Validate, text: str) -> None:
    """The variable may be in `option.env`, too."""
    long = option(max_model_len="200k")
    assert validated(LLAMA_8B, long)[0] == 2
    for environ in (
        {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": text},
        option(env=f"VLLM_ALLOW_LONG_MAX_MODEL_LEN={text}"),
    ):
        _, document = validated(LLAMA_8B, {**long, **environ})
        assert not any("own length" in error for error in document["errors"])
        assert any("own length" in warning for warning in document["warnings"])


def test_config_alone_is_checked_as_that_of_a_named_model(
    validated: Validate, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`--config DIR` is what the page recommends where there is no model yet."""
    long = {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}
    short = {"model_type": "nomic_bert", "max_trained_positions": 2048}
    for config, field, text in (
        (LLAMA_8B | long, "warnings", "max_model_len is 4096, though the model takes 131072"),
        (LLAMA_8B | short, "errors", "512 is below 2048"),
    ):
        folder = tmp_path_factory.mktemp("config")
        (folder / "config.json").write_text(json.dumps(config))
        store = tmp_path_factory.mktemp("store")
        flags = ("--config", str(folder), "--model-store", str(store))
        given = option(max_model_len="512") if field == "errors" else {}
        _, document = validated(None, given, *flags)
        assert any(text in one for one in document[field]), document[field]
        assert not any("no model" in one for one in document["errors"])


def option(**options: str) -> dict[str, str]:
    """Options as variables."""
    return {f"OPTION_{name.upper()}": text for name, text in options.items()}


ERRORS = (  # config changes, options, gpus, a part of the error
    ({"architectures": ["LlamaForCausalLMM"]}, {}, 1, "LlamaForCausalLM"),
    ({"architectures": []}, {}, 1, "no architectures"),
    ({"architectures": ["Own"], "auto_map": {}}, {}, 1, "trust_remote_code"),
    ({}, {"hf_overrides": '{"architectures": ["Nope"]}'}, 1, "architecture Nope is not known"),
    ({}, {"max_model_len": "200k"}, 1, "131072"),
    ({"model_max_length": 140000}, {"max_model_len": "150000"}, 1, "140000"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"max_model_len": "300000"}, 1,
     "262144"),
    ({}, {"tensor_parallel_degree": "3"}, 3, "32 attention heads"),
    ({"num_attention_heads": 24, "num_key_value_heads": 4}, {"tensor_parallel_degree": "6"}, 6,
     "KV heads"),
    ({}, {"pipeline_parallel_degree": "33"}, 33, "32 layers"),
    ({}, {"quantize": "awq"}, 1, "quantization_config"),
    ({"quantization_config": {"quant_method": "gptq"}}, {"quantize": "awq"}, 1, "gptq"),
    ({"quantization_config": {"quant_method": "awq"}}, {"quantize": "awq", "dtype": "fp32"}, 1,
     "float16 or bfloat16"),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "options", "gpus", "part"), ERRORS)
def test_arguments_that_vllm_refuses_are_errors(
    changes: dict[str, Any], options: dict[str, str], gpus: int, part: str, validated: Validate
) -> None:
    """Found before the engine starts, from config.json alone."""
    code, document = validated(LLAMA_8B | changes, option(**options), "--gpus", str(gpus))
    assert code == 2
    assert any(part in text for text in document["errors"]), document["errors"]


FINE = (
    ({}, {}, 1),
    ({}, {"tensor_parallel_degree": "8"}, 8),
    ({"num_key_value_heads": 8}, {"tensor_parallel_degree": "16"}, 16),
    ({}, {"max_model_len": "131072"}, 1),
    ({"architectures": ["Own"], "auto_map": {}}, {"trust_remote_code": "true"}, 1),
    *(({"architectures": [name]}, {}, 1) for name in (
        "LlamaForSequenceClassification", "Qwen3ForTokenClassification", "Gemma2RewardModel",
        "Phi3Model",
    )),
    ({"architectures": ["PersimmonForCausalLM"], "model_type": "persimmon"}, {}, 1),
    ({"architectures": [], "model_type": "llama"}, {}, 1),
    ({"model_max_length": 140000}, {"max_model_len": "140000"}, 1),
    ({}, {"max_model_len": "262144", "hf_overrides": '{"max_position_embeddings": 262144}'}, 1),
    ({}, {"max_model_len": "262144",
          "hf_overrides": '{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}'}, 1),
    ({"quantization_config": {"quant_method": "awq"}}, {"quantize": "awq_marlin"}, 1),
    ({}, {"quantize": "fp8"}, 1),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"max_model_len": "262144"}, 1),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "options", "gpus"), FINE)
def test_working_combinations_have_no_error(
    changes: dict[str, Any], options: dict[str, str], gpus: int, validated: Validate
) -> None:
    """Combinations vLLM accepts."""
    code, document = validated(LLAMA_8B | changes, option(**options), "--gpus", str(gpus))
    assert (code, document["errors"]) == (0, [])


def test_family_that_vllm_may_run_in_another_way_is_a_warning(validated: Validate) -> None:
    """Persimmon answers through vLLM's Transformers backend; not every family does."""
    changes = {"architectures": ["PersimmonForCausalLM"], "model_type": "persimmon"}
    _, document = validated(LLAMA_8B | changes)
    assert any("tried with vLLM's Transformers backend" in one for one in document["warnings"])


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
        {"model_type": "falcon_h1", "mamba_d_ssm": 3072},
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "aria_text", "moe_num_experts": 64},
        {"model_type": "albert"},
    ],
    ids=lambda changes: changes["model_type"],
)
def test_family_that_is_not_counted_has_no_estimate(
    validated: Validate, changes: Mapping[str, Any]
) -> None:
    """They were counted as Llama's layers: Aria with a twelfth of its weights, Zamba2 twice."""
    _, document = validated(LLAMA_8B | changes, {}, "--device-memory", "80")
    said = f"layers or weights of {changes['model_type']} cannot be counted here"
    assert any(said in one for one in document["warnings"])
    assert not any("estimate for each GPU" in one for one in document["warnings"])


def test_encoder_keeps_no_cache(validated: Validate) -> None:
    """It reads a text at once."""
    changes = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}
    _, document = validated(LLAMA_8B | changes, option(max_model_len="512"),
                            "--device-memory", "80")  # fmt: skip
    (said,) = (one for one in document["warnings"] if "estimate for each GPU" in one)
    assert "KV cache 0 bytes a token; fits at gpu_memory_utilization 0.92 on 80.0 GiB" in said


def test_redundant_quantize_is_warned(validated: Validate) -> None:
    """A checkpoint that names its method needs no option (config/quantization.md)."""
    config = LLAMA_8B | {"quantization_config": {"quant_method": "awq"}}
    _, document = validated(config, option(quantize="awq"))
    assert any("better left out" in text for text in document["warnings"])


def test_methods_of_modelopt_are_left_to_vllm(validated: Validate) -> None:
    """It reads each that begins so, and goes by another field."""
    config = LLAMA_8B | {"quantization_config": {"quant_method": "modelopt_fp8"}}
    _, document = validated(config)
    assert not any("does not read" in text for text in document["errors"])


EXPERTS = (
    {"num_local_experts": 8},
    {"ffn_config": {"moe_num_experts": 16}},
    {"moe_num_experts": [64, 64]},
    {"thinker_config": {"text_config": {"num_experts": 128}}},
)


def test_experts_only_method_is_refused_without_experts(validated: Validate) -> None:
    """And counts for nothing in the estimate; a mixture is served."""
    code, dense = validated(LLAMA_8B, option(quantize="experts_int8"))
    assert code != 0
    assert sum("quantization=experts_int8 quantizes" in text for text in dense["errors"]) == 1
    for experts in EXPERTS:
        _, mixture = validated(LLAMA_8B | experts, option(quantize="experts_int8"))
        assert not any("experts_int8" in text for text in mixture["errors"])
    shape = read_shape(LLAMA_8B)
    estimate = estimate_memory(shape, {"quantization": "experts_int8"}, WEIGHTS_8B, None)
    assert estimate is not None
    assert estimate.weight_bytes == WEIGHTS_8B


@pytest.mark.parametrize(
    "asked", ["quantize=bitsandbytes", "quantize=bitsandbytes8", "quantize=dynamic_int8",
              "load_in_8bit=true"],
)  # fmt: skip
def test_8bit_option_halves_every_model(validated: Validate, asked: str) -> None:
    """Dense or a mixture, on a GPU that is sized for 8 bits; the estimate counts them."""
    name, _, value = asked.partition("=")
    for experts in ({}, *EXPERTS):
        _, said = validated(LLAMA_8B | experts, option(**{name: value}))
        assert said["errors"] == []
        assert said["engine_args"]["quantization"] == "fp8"


def test_estimate_follows_its_formula() -> None:
    """Weights, KV cache and what fits, calculated by hand for an 8B model."""
    shape = read_shape(LLAMA_8B)
    arguments = {"gpu_memory_utilization": 0.9, "tensor_parallel_size": 1}
    estimate = estimate_memory(shape, arguments, WEIGHTS_8B, 24 * GIB)
    assert estimate is not None
    assert estimate.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    free = 24 * GIB * 0.9 - WEIGHTS_8B - 2 * GIB
    assert estimate.longest_fit == int(free / 131072)
    counted = estimate_memory(shape, arguments, None, None)
    assert counted is not None
    assert counted.weight_bytes == pytest.approx(WEIGHTS_8B, rel=0.001)
    halved = estimate_memory(shape, arguments | {"tensor_parallel_size": 2}, WEIGHTS_8B, None)
    assert halved is not None
    assert halved.weight_bytes == WEIGHTS_8B // 2
    assert halved.kv_bytes_per_token == 65536


def test_estimate_counts_quantization_dtype_lora_and_latent_attention() -> None:
    """What changes the bytes of weights, cache and slots."""
    shape = read_shape(LLAMA_8B)
    fp8 = estimate_memory(shape, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, WEIGHTS_8B, None)
    assert fp8 is not None
    linear = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)  # embeddings stay as they are
    assert fp8.weight_bytes == WEIGHTS_8B - linear
    assert fp8.kv_bytes_per_token == 65536
    slots = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    lora = estimate_memory(shape, slots, WEIGHTS_8B, None)
    widths = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14336) * 3
    assert lora is not None
    assert lora.lora_bytes == 2 * 8 * widths * 32 * 2
    latent = read_shape(LLAMA_8B | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    mla = estimate_memory(latent, {"tensor_parallel_size": 8}, WEIGHTS_8B, None)
    assert mla is not None
    assert mla.kv_bytes_per_token == 32 * 576 * 2


def test_model_that_cannot_fit_is_an_error_with_the_formula(validated: Validate) -> None:
    """On 16 GiB an 8B model has no room; on 80 GiB the estimate is a note."""
    code, document = validated(LLAMA_8B, {}, "--device-memory", "16")
    assert code == 2
    assert "estimate" in document["errors"][-1]
    assert "Formula" in document["errors"][-1]
    code, document = validated(LLAMA_8B, {}, "--device-memory", "80")
    assert code == 0
    assert "fits with max_model_len <= 131072" in document["warnings"][-1]


def test_fixed_cache_size_is_the_limit(validated: Validate) -> None:
    """kv_cache_memory_bytes decides where it is set."""
    options = option(kv_cache_memory_bytes="1G", max_model_len="9000")
    code, document = validated(LLAMA_8B, options)
    assert code == 2
    assert "8192" in document["errors"][-1]


def test_model_without_config_is_reported_as_unchecked(validated: Validate) -> None:
    """Nothing is promised that was not looked at."""
    code, document = validated(None)
    assert code == 2
    assert "not checked against the model" in document["errors"][-1]
    _, document = validated(None, {"HF_MODEL_ID": "a/b"}, "--offline")
    assert "--offline" in document["errors"][-1]


class HubHandler(BaseHTTPRequestHandler):
    """Serves one repository's two small files, behind a redirect, and notes what it was sent."""

    seen: list[tuple[str, str | None]]
    files: dict[str, str]

    def do_GET(self) -> None:
        """The file, or 404."""
        type(self).seen.append((self.path, self.headers.get("Authorization")))
        text = type(self).files.get(self.path)
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[tuple[str, type[HubHandler]]]:
    """A hub on loopback."""
    handler = type("Handler", (HubHandler,), {"seen": [], "files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_config_of_a_hub_model_is_fetched_and_nothing_else(
    hub: tuple[str, type[HubHandler]], validated: Validate
) -> None:
    """config.json and the index, with the token, at the revision."""
    endpoint, handler = hub
    base = "/acme/x/resolve/v1/"
    handler.files[f"{base}config.json"] = json.dumps(LLAMA_8B)
    handler.files[f"{base}model.safetensors.index.json"] = json.dumps(
        {"metadata": {"total_size": WEIGHTS_8B}}
    )
    environ = {"HF_MODEL_ID": "acme/x", "HF_REVISION": "v1", "HF_ENDPOINT": endpoint}
    _, document = validated(None, environ | {"HF_TOKEN": "t0ken"}, "--device-memory", "80")
    assert "weights 14.96 GiB" in document["warnings"][-1]
    assert [path for path, _ in handler.seen] == [
        f"{base}config.json", f"{base}model.safetensors.index.json",
    ]  # fmt: skip
    assert {sent for _, sent in handler.seen} == {"Bearer t0ken"}
    assert "t0ken" not in json.dumps(document)


def test_config_of_an_s3_model_is_fetched_and_nothing_else(
    empty_store: S3Server, validated: Validate
) -> None:
    """The two small objects below the prefix; what is not there is said, and no key is printed."""
    index = {"metadata": {"total_size": WEIGHTS_8B}}
    empty_store.put(
        {
            "tiny/config.json": json.dumps(LLAMA_8B).encode(),
            "tiny/model.safetensors.index.json": json.dumps(index).encode(),
            "tiny/model.safetensors": b"weights",
        }
    )
    environ = {**empty_store.environ, "HF_MODEL_ID": f"s3://{BUCKET}/tiny/"}
    code, document = validated(None, environ, "--device-memory", "80")
    assert code == 0, document["errors"]
    assert "weights 14.96 GiB" in document["warnings"][-1]
    assert "tiny/model.safetensors" not in empty_store.objects_sent
    environ["HF_MODEL_ID"] = f"s3://{BUCKET}/nothing/"
    code, document = validated(None, environ)
    (error,) = document["errors"]
    assert error.startswith(
        f"option.model_id (HF_MODEL_ID): s3://{BUCKET}/nothing/ holds no objects"
    )
    environ["HF_MODEL_ID"] = "s3://no-such-bucket/x/"
    code, document = validated(None, environ)
    assert "does not exist" in document["errors"][-1]
    assert empty_store.environ["AWS_SECRET_ACCESS_KEY"] not in json.dumps(document)


def test_overridden_architectures_are_those_vllm_looks_up() -> None:
    """`validate` then checks the name of hf_overrides and not the checkpoint's."""
    overrides = {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}
    assert served_architectures(("AquilaForCausalLM",), overrides) == ("LlamaForCausalLM",)
    assert served_architectures(("AquilaForCausalLM",), {}) == ("AquilaForCausalLM",)


def test_architecture_of_another_engine_is_known() -> None:
    """Although vLLM does not have it; a longer max_model_len than n_positions is T5's to take."""
    shape = read_shape({"architectures": ["T5ForConditionalGeneration"], "n_positions": 512})
    found = check_model(shape, {"max_model_len": 2048}, CONFIGURATION)
    assert found.errors == ()
    assert "Transformers engine" in found.warnings[0]
