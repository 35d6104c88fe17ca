"""Unknown names, near misses, strict mode, names that are not ours (docs/configuration.md)."""

import pytest

from tests.unit.conftest import ExplainRun

UNKNOWN = (  # file, environment, what the one message must hold
    ("option.max_modle_len=5", "", ("option.max_modle_len", "line 1", "option.max_model_len")),
    ("option.quantise=awq", "", ("option.quantise", "option.quantize")),
    ("option.Quantize=awq", "", ("option.Quantize", "option.quantize")),
    ("quantize=awq", "", ("quantize", "write option.quantize")),
    ("job_queue_sise=5", "", ("job_queue_sise", "job_queue_size")),
    ("", "OPTION_REQUIRED_MEMORY_MB=5", ("write required_memory_mb into serving.properties",)),
    ("", "SERVING_REQUIRED_MEMORY_MB=5", ("write required_memory_mb into serving.properties",)),
    ("", "OPTION_QUANTISE=awq", ("OPTION_QUANTISE", "OPTION_QUANTIZE")),
    ("", "OPTION_Quantize=awq", ("OPTION_Quantize", "write OPTION_QUANTIZE")),
    ("", "OPTION_PYTHONEXECUTABLE=/p", ("OPTION_PYTHONEXECUTABLE", "OPTION_pythonExecutable")),
    ("", "OPTION_JOB_QUEUE_SIZE=5", ("OPTION_JOB_QUEUE_SIZE", "SERVING_JOB_QUEUE_SIZE")),
    ("", "SERVING_JOB_QUEUE=5", ("SERVING_JOB_QUEUE", "SERVING_JOB_QUEUE_SIZE")),
    ("", "LMI_STRIKT=true", ("LMI_STRIKT", "LMI_STRICT")),
    ("", "option_quantize=awq", ("option_quantize", "write OPTION_QUANTIZE")),
    ("", "Serving_Job_Queue_Size=5", ("Serving_Job_Queue_Size", "write SERVING_JOB_QUEUE_SIZE")),
    ("", "lmi_strict=true", ("lmi_strict", "write LMI_STRICT")),
    ("fail_fast=true", "", ("fail_fast", "write SERVING_FAIL_FAST")),
    ("", "OPTION_SLEEP_AFTER_SECONDS=9", ("OPTION_SLEEP", "write LMI_SLEEP_AFTER_SECONDS")),
    ("", "SERVING_WAKE_TIMEOUT=9", ("SERVING_WAKE", "write LMI_WAKE_TIMEOUT")),
    ("option.sleep_level=1", "", ("option.sleep_level", "write LMI_SLEEP_LEVEL")),
    ("", "SERVING_ENGINE=Python", ("SERVING_ENGINE", "write OPTION_ENGINE")),
    ("option.s3url=s3://b/p", "", ("option.s3url", "write option.model_id=s3://")),
    ("", "OPTION_ZZZ=k", ("OPTION_ZZZ", "none of the")),
    ("", "SERVING_PORT=8080", ("SERVING_PORT", "SERVING_INFERENCE_ADDRESS", "--port")),
    ("", "LMI_PORT=8080", ("LMI_PORT", "SERVING_INFERENCE_ADDRESS")),
    ("option.zzz=1", "", ("option.zzz", "none of the", "lmi-vllm explain")),
)


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HF_MODEL_ID", "acme/x"),
        ("MODEL_ID", "acme/x"),
        ("SM_VLLM_MODEL", "acme/x"),
        ("OPTION_MAX_MODEL_LEN", "64"),
        ("OPTION_ENABLE_LORA", "true"),
        ("SERVING_JOB_QUEUE_SIZE", "9"),
        ("LMI_API_KEY", "not-a-real-key"),
        ("VLLM_LOGGING_LEVEL", "INFO"),
    ],
)
def test_quotes_that_no_shell_took_off_are_an_error(
    name: str, text: str, quote: str, explained: ExplainRun
) -> None:
    """`docker --env-file` keeps them; the value is not shown, for it may be a key."""
    run = explained("", {name: f"{quote}{text}{quote}"})
    (error,) = (one for one in run.document["errors"] if "has quotes around" in one)
    assert run.exit_code
    assert error.startswith(f"{name} has quotes")
    assert text not in error


@pytest.mark.parametrize("text", ['{"a": 1}', '["a"]', '"a","b"', '"', "a"])
def test_quotes_inside_a_value_are_left(text: str, explained: ExplainRun) -> None:
    """They belong to it."""
    run = explained("", {"OPTION_CHAT_TEMPLATE_KWARGS": text})
    assert not any("has quotes around" in one for one in run.document["errors"])


@pytest.mark.parametrize(("file", "environ", "parts"), UNKNOWN, ids=lambda part: str(part) or "-")
def test_unknown_name_is_one_warning_and_in_strict_mode_an_error(
    file: str, environ: str, parts: tuple[str, ...], explained: ExplainRun
) -> None:
    """The message names the key, its place and what was probably meant."""
    run = explained(file, environ)
    assert (run.exit_code, len(run.warnings)) == (0, 1), run.document
    assert all(part in run.warnings[0] for part in parts), run.warnings
    strict = explained(file, f"{environ} LMI_STRICT=true")
    assert strict.errors == run.warnings
    assert strict.exit_code == 2
    assert explained(file, environ, "--strict").errors == run.warnings
    assert [row for row in run.document["options"] if row["effect"] == "unknown"]


def test_closest_names_are_listed(explained: ExplainRun) -> None:
    """A typo brings at most three suggestions, the best first."""
    [warning] = explained("option.max_rolling_bach_size=5").warnings
    first, *others = warning.split("closest names: ")[1].split(", ")
    assert first == "option.max_rolling_batch_size"
    assert len(others) < 3


QUIET = (
    "SERVING_SERVICE_HOST", "SERVING_SERVICE_PORT", "SERVING_SERVICE_PORT_HTTP", "SERVING_PORT",
    "LMI_PORT_8080_TCP", "LMI_PORT_8080_TCP_ADDR", "LMI_VLLM_SERVICE_HOST", "OPTION_PORT_80_UDP",
    "OPTION_PORT_80_TCP_PROTO", "LMI_PORT",
)  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_names_kubernetes_makes_are_quiet_in_strict_mode(name: str, explained: ExplainRun) -> None:
    """A Service called serving, lmi or option fills the environment with such names."""
    run = explained("", {name: "tcp://10.0.0.1:80"}, "--strict")
    assert (run.exit_code, run.warnings) == (0, [])


def test_engine_argument_that_looks_like_kubernetes_is_read(explained: ExplainRun) -> None:
    """OPTION_MASTER_PORT is an engine argument, unless its value is a Service's address."""
    assert explained("", "OPTION_MASTER_PORT=29500").engine_args["master_port"] == 29500
    made = explained("", {"OPTION_MASTER_PORT": "tcp://10.0.0.1:80"}, "--strict")
    assert (made.exit_code, made.warnings) == (0, [])


def test_known_option_without_effect_stays_a_warning_in_strict_mode(explained: ExplainRun) -> None:
    """Strict means unknown names only."""
    run = explained("option.bedrock_compat=true", "", "--strict")
    assert (run.exit_code, len(run.warnings)) == (0, 1)


def test_duplicate_keys_are_named_with_both_lines(explained: ExplainRun) -> None:
    """The last duplicate wins and the warning names every line."""
    run = explained("option.max_loras=2\n# c\noption.max_loras=3")
    assert run.engine_args["max_loras"] == 3
    assert "option.max_loras is set on lines 1, 3" in run.warnings[0]


PAIRS = (
    ("model_id", "a/b", "model", "a/b", "c/d"),
    ("quantize", "awq", "quantization", "awq", "gptq"),
    ("max_rolling_batch_prefill_tokens", "1000", "max_num_batched_tokens", "1k", "1K"),
    ("cpu_offload_gb_per_gpu", "4", "cpu_offload_gb", "4.0", "5"),
    ("tensor_parallel_degree", "2", "tensor_parallel_size", "2.0", "4"),
    ("pipeline_parallel_degree", "2", "pipeline_parallel_size", " 2", "1"),
    ("max_rolling_batch_size", "8", "max_num_seqs", "8", "9"),
)


@pytest.mark.parametrize(("lmi", "value", "vllm", "equal", "different"), PAIRS)
def test_two_names_of_one_setting_must_agree(
    lmi: str, value: str, vllm: str, equal: str, different: str, explained: ExplainRun
) -> None:
    """Equal after conversion is fine, different is an error naming both with their origins."""
    variable = f"OPTION_{vllm.upper()}"
    fine = explained(f"option.{lmi}={value}", {variable: equal})
    assert fine.errors == []
    clash = explained(f"option.{lmi}={value}", {variable: different})
    assert clash.exit_code == 2
    assert any(
        f"option.{lmi}={value}" in text and variable in text and "serving.properties line 1" in text
        for text in clash.errors
    )


def test_every_error_is_reported_at_once(explained: ExplainRun) -> None:
    """Not the first one only, and the arguments are printed as well."""
    run = explained("option.dtype=int8\noption.max_loras=x\noption.quantize=gguf")
    assert len(run.errors) == 3
    assert run.engine_args["max_num_seqs"] == 256


@pytest.mark.parametrize("name", ["LMI_VLLM_EXTRA", "LMI_VLLM_CONSTRAINTS", "LMI_TEST_TOOLS"])
def test_variables_of_the_checkout_are_no_mistake(explained: ExplainRun, name: str) -> None:
    """`make serve` hands on what set-up and tests read; in strict mode too."""
    run = explained("", {name: "none"}, "--strict")
    assert (run.errors, run.warnings) == ([], [])
