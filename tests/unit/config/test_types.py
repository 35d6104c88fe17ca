"""The type rules (docs/option-values.md#values), and vLLM's own reading of pass-through values."""

from pathlib import Path

import pytest

from lmi_vllm.config.parsers import dtype, human_int, java_true, modality_limits
from lmi_vllm.config.value_rules import log_level
from tests.support.assembled import OPTIONS
from tests.unit.conftest import ExplainRun

READ = (  # option, text, argument, value
    *(("enforce_eager", text, "enforce_eager", True) for text in
      ("true", "TRUE", "1", "yes", "on", "t", "Y")),
    *(("enforce_eager", text, "enforce_eager", False) for text in
      ("false", "False", "0", "no", "off", "f", "N")),
    ("disable_cascade_attn", "yes", "disable_cascade_attn", True),
    ("async_scheduling", "0", "async_scheduling", False),
    ("disable_log_stats", "TRUE", "disable_log_stats", True),
    ("max_loras", "4", "max_loras", 4),
    ("max_loras", "4.0", "max_loras", 4),
    ("seed", "7", "seed", 7),
    ("max_model_len", "16384", "max_model_len", 16384),
    ("max_model_len", "16k", "max_model_len", 16000),
    ("max_model_len", "16K", "max_model_len", 16384),
    ("max_model_len", "25.6k", "max_model_len", 25600),
    ("max_model_len", "-1", "max_model_len", -1),
    ("max_model_len", "AUTO", "max_model_len", -1),
    ("kv_cache_memory_bytes", "64M", "kv_cache_memory_bytes", 64 << 20),
    ("max_num_batched_tokens", "1M", "max_num_batched_tokens", 1 << 20),
    ("gpu_memory_utilization", "0.9", "gpu_memory_utilization", 0.9),
    ("override_generation_config", '{"top_p": 0.5}', "override_generation_config", {"top_p": 0.5}),
    ("compilation_config", '{"mode": 3}', "compilation_config", {"mode": 3}),
    ("kv_transfer_config", '{"kv_role": "kv_both", "kv_buffer_size": 80m}', "kv_transfer_config",
     {"kv_role": "kv_both", "kv_buffer_size": 80_000_000}),
    ("served_model_name", "a,b", "served_model_name", ["a", "b"]),
    ("served_model_name", '["a", "b,c"]', "served_model_name", ["a", "b,c"]),
    ("cudagraph_capture_sizes", "1,2,4", "cudagraph_capture_sizes", [1, 2, 4]),
    ("cudagraph_capture_sizes", "[1, 2]", "cudagraph_capture_sizes", [1, 2]),
    ("ignore_patterns", "a/*,b/*", "ignore_patterns", ["a/*", "b/*"]),
    ("device_ids", "0,2", "device_ids", [0, 2]),
    ("moe_backend", "Deep-GEMM", "moe_backend", "deep_gemm"),
    ("kv_cache_dtype", "fp8", "kv_cache_dtype", "fp8"),
    ("model_loader_extra_config", '{"a": 1}', "model_loader_extra_config", {"a": 1}),
    ("attention_backend", "None", "attention_backend", "<absent>"),
    ("revision", "", "revision", None),
    ("max_loras", "None", "max_loras", 4),
    ("enable_log_requests", "true", "enable_log_requests", True),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text", "argument", "value"), READ)
def test_text_is_read_as_its_kind(
    name: str, text: str, argument: str, value: object, explained: ExplainRun
) -> None:
    """The argument has the value and the JSON type that vLLM's command line would give it."""
    run = explained("", {f"OPTION_{name.upper()}": text} if text else {})
    assert run.errors == []
    assert run.engine_args.get(argument, "<absent>") == value
    assert type(run.engine_args.get(argument, "<absent>")) is type(value)


REFUSED = (
    ("enforce_eager", "2"), ("enforce_eager", " true"), ("max_loras", "4.5"), ("max_loras", "max"),
    ("max_loras", "-1"), ("tensor_parallel_degree", "4.5"), ("tensor_parallel_degree", "most"),
    ("max_model_len", "1.5K"), ("max_model_len", "many"), ("gpu_memory_utilization", "nan"),
    ("gpu_memory_utilization", "inf"), ("kv_cache_dtype", "fp7"), ("compilation_config", "[1]"),
    ("compilation_config", "{"), ("hf_overrides", "{broken}"),
    ("hf_overrides", '{"a": NaN}'), ("tokenizer_mode", "true"),
    ("served_model_name", "[1]"), ("seed", "one"), ("cudagraph_capture_sizes", "1,x"),
    ("async_scheduling", "maybe"), ("generation_config", "False"), ("seed", "9" * 60),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_wrong_text_is_an_error_naming_option_origin_and_value(
    name: str, text: str, explained: ExplainRun
) -> None:
    """Errors name the option, the variable and the text."""
    run = explained("", {f"OPTION_{name.upper()}": text})
    assert run.exit_code == 2
    [error] = run.errors
    assert f"option.{name}={text} (OPTION_{name.upper()})" in error


def test_empty_boolean_in_the_file_is_an_error(explained: ExplainRun) -> None:
    """Booleans of ours; in the environment an empty value is no value."""
    assert explained("option.enable_lora=").exit_code == 2
    assert explained("", {"OPTION_ENABLE_LORA": ""}, "--model-store", "/nonexistent").errors == []


def test_front_end_argument_of_vllm_is_named(explained: ExplainRun) -> None:
    """Flags of vLLM's own server are known, and said to have no effect."""
    [warning] = explained("option.uvicorn_log_level=info").warnings
    assert "option.uvicorn_log_level" in warning
    assert "HTTP server" in warning


SERVER = (
    ("", "SERVING_JOB_QUEUE_SIZE=many", "SERVING_JOB_QUEUE_SIZE"),
    ("job_queue_size=0", "", "job_queue_size"),
    ("", "SERVING_THROTTLE_ERROR_HTTP_CODE=9", "SERVING_THROTTLE_ERROR_HTTP_CODE"),
    ("", "SERVING_INFERENCE_ADDRESS=a b", "SERVING_INFERENCE_ADDRESS"),
    ("", "SAGEMAKER_BIND_TO_PORT=99999", "SAGEMAKER_BIND_TO_PORT"),
    ("", "SERVING_OPTS=-Xmx1g -Dai.djl.logging.level=verbose", "SERVING_OPTS"),
    ("", "SERVING_OPTS=-Dai.djl.logging.level=", "SERVING_OPTS"),
    ("", "LMI_CUSTOM_CODE=some", "LMI_CUSTOM_CODE"),
    ("", "LMI_STRICT=maybe", "LMI_STRICT"),
    ("engine=XGBoost", "", "engine"),
    ("engine=TritonServer", "", "engine"),
    ("", "OPTION_ENGINE=TensorFlow", "OPTION_ENGINE"),
)


@pytest.mark.parametrize(("file", "environ", "name"), SERVER)
def test_wrong_server_value_is_an_error(
    file: str, environ: str, name: str, explained: ExplainRun
) -> None:
    """Server settings are checked like options."""
    variables = dict([environ.split("=", 1)]) if environ else {}
    run = explained(file, variables)
    assert run.exit_code == 2
    assert name in run.errors[0]


def test_level_of_the_log_is_read_from_java_s_options(explained: ExplainRun) -> None:
    """In any case, among other options; one that does not exist ends the start."""
    options = "-Xmx1g -Dai.djl.logging.level=DEBUG -Dx=y"
    assert explained("", {"SERVING_OPTS": options}).exit_code == 0
    assert (log_level(options), log_level("-Xmx1g")) == ("debug", "info")
    (error,) = explained("", {"SERVING_OPTS": "-Dai.djl.logging.level=verbose"}).errors
    assert "allowed are trace, debug, info, warn, error, fatal, off" in error


ACCEPTED = (
    "max_batch_delay=100", "option.max_batch_delay=100", "max_idle_time=60",
    "option.max_idle_time=60", "engine=Python", "minWorkers=1", "gpu.minWorkers=1",
    "retry_threshold=2", "gpu.maxWorkers=4",
    "batch_size=1",
)  # fmt: skip


@pytest.mark.parametrize("line", ACCEPTED)
def test_unprefixed_setting_is_accepted(line: str, explained: ExplainRun) -> None:
    """Known, without a warning."""
    check_accepted(line, explained)


def check_accepted(line: str, explained: ExplainRun) -> None:
    """A line draws neither error nor warning."""
    run = explained(line)
    assert (run.errors, run.warnings) == ([], [])


WARNED = (
    "batch_size=4", "max_dynamic_batch_size=4", "engine=DeepSpeed", "engine=FasterTransformer",
    "engine=MPI", "job_queue_size=5",
)  # fmt: skip


@pytest.mark.parametrize("line", WARNED)
def test_unprefixed_setting_is_warned(line: str, explained: ExplainRun) -> None:
    """Section 9 and 7.1: accepted with one warning."""
    run = explained(line)
    assert run.errors == []
    assert len(run.warnings) == 1


@pytest.mark.parametrize("line", ["engine=Rust", "option.engine=OnnxRuntime", "engine=pytorch"])
def test_engine_that_embedded_texts_is_served_by_vllm(line: str, explained: ExplainRun) -> None:
    """LMI's guide to text embedding: one warning; the feature text_embedding has the rest."""
    factory = "translatorFactory=ai.djl.huggingface.translator.TextEmbeddingTranslatorFactory"
    run = explained(f"{line}\n{factory}\noption.model_id=BAAI/bge-base-en-v1.5")
    assert (run.errors, len(run.warnings)) == ([], 1)


def test_model_of_djl_s_zoo_is_the_hub_s(explained: ExplainRun) -> None:
    """The zoo's address holds the hub id."""
    run = explained("", "HF_MODEL_ID=djl://ai.djl.huggingface.onnxruntime/BAAI/bge-base-en-v1.5")
    assert run.engine_args["model"] == "BAAI/bge-base-en-v1.5"
    assert "hub id" in explained("", "HF_MODEL_ID=djl://ai.djl.huggingface.rust/").errors[0]


@pytest.mark.parametrize(
    ("lines", "name"),
    [("option.engine=DeepSpeed", "config.json"), ("option.model_dir=/no/where", "model_dir")],
)
def test_directory_without_a_model_is_an_error(
    lines: str, name: str, explained: ExplainRun, tmp_path: Path
) -> None:
    """Said here, and not by vLLM once it has started."""
    explained(lines)
    (tmp_path / "store" / "config.json").unlink(missing_ok=True)
    run = explained(lines.replace("engine=", "engine = "))
    assert run.exit_code == 2
    assert name in run.errors[0]


def test_words_of_the_model_s_tokens_are_no_secrets(explained: ExplainRun) -> None:
    """What counts tokens is shown; what is one is not."""
    run = explained("option.smoothquant_per_token=true\noption.long_prefill_token_threshold=7")
    assert run.option("smoothquant_per_token")["value"] == "true"
    assert run.option("long_prefill_token_threshold")["value"] == 7
    assert explained("", "HF_TOKEN=abc").option("HF_TOKEN")["value"] == "***"


def test_name_of_a_header_is_no_secret(explained: ExplainRun) -> None:
    """Though it is that of one which may carry some key."""
    run = explained("", "SERVING_REQUEST_ID_HEADER_KEY=X-Amzn-Trace-Id")
    assert run.option("request_id_header_key")["value"] == "X-Amzn-Trace-Id"


@pytest.mark.parametrize(
    ("ending", "factor"),
    [*zip("kmgt", (10**3, 10**6, 10**9, 10**12), strict=True),
     *zip("KMGT", (1 << 10, 1 << 20, 1 << 30, 1 << 40), strict=True)],
)  # fmt: skip
def test_every_ending_of_a_number_has_its_factor(ending: str, factor: int) -> None:
    """Small letters are decimal, capital ones binary."""
    assert human_int(f"3{ending}") == 3 * factor


def test_every_number_of_bytes_takes_an_ending() -> None:
    """Whatever says that it is a number of bytes is read in the same way."""
    rows = [row for row in (*OPTIONS.rows.server, *OPTIONS.rows.variables) if row.values == "bytes"]
    assert {row.name: row.parse("2K") for row in rows} == {row.name: 2048 for row in rows} != {}


@pytest.mark.parametrize("text", ["image", "=4", "image=4,=2", "image=4,video"])
def test_a_limit_needs_a_name_and_a_number(text: str) -> None:
    """Half of a pair is no limit of anything."""
    with pytest.raises(ValueError, match="image=4,video=2"):
        modality_limits(text)


def test_only_int8_is_sent_to_quantization() -> None:
    """The advice stands where it helps."""
    with pytest.raises(ValueError, match=r"option\.quantize"):
        dtype("int8")
    with pytest.raises(ValueError, match="allowed are") as caught:
        dtype("int16")
    assert "quantize" not in str(caught.value)


def test_only_true_is_java_s_true() -> None:
    """Everything else is false, wherever it stands in the alphabet."""
    assert [java_true(text) for text in ("True", "truf", "yes", "false")] == [True, *[False] * 3]


def test_model_dir_beside_a_model_id_is_named(explained: ExplainRun) -> None:
    """Whether it exists or not: the id names the model."""
    run = explained("option.model_id=a/b\noption.model_dir=/no/such")
    [warning] = [text for text in run.warnings if "model_dir" in text]
    assert "has no effect: the model is option.model_id=a/b" in warning
