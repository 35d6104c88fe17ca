"""Precedence: the two orders and the name rules (docs/configuration.md#precedence)."""

from pathlib import Path

import pytest

from lmi_vllm.config.properties import parse_properties
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.messages import Origin, OriginKind
from tests.support.assembled import load_settings
from tests.unit.conftest import ExplainRun

MODEL_ORDER = (  # file, environment, server or option name, value, origin
    ("option.predict_timeout=1", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS=2", "predict_timeout", 2,
     "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS"),
    ("option.model_loading_timeout=1", "SAGEMAKER_STARTUP_TIMEOUT=2 OPTION_MODEL_LOADING_TIMEOUT=3",
     "model_loading_timeout", 2, "SAGEMAKER_STARTUP_TIMEOUT"),
    ("maxWorkers=1", "SAGEMAKER_NUM_MODEL_WORKERS=2", "maxWorkers", 2,
     "SAGEMAKER_NUM_MODEL_WORKERS"),
    ("option.predict_timeout=1", "OPTION_PREDICT_TIMEOUT=2", "predict_timeout", 1, "line 1"),
    ("", "OPTION_PREDICT_TIMEOUT=2 PREDICT_TIMEOUT=3", "predict_timeout", 2,
     "OPTION_PREDICT_TIMEOUT"),
    ("", "PREDICT_TIMEOUT=3", "predict_timeout", 3, "PREDICT_TIMEOUT"),
    ("", "MODEL_LOADING_TIMEOUT=3", "model_loading_timeout", 3, "MODEL_LOADING_TIMEOUT"),
    ("model_loading_timeout=9", "", "model_loading_timeout", 9, "line 1"),
    ("model_loading_timeout=9\noption.model_loading_timeout=", "", "model_loading_timeout", 9,
     "line 1"),
    ("", "", "model_loading_timeout", 1800, "default"),
    ("", "", "predict_timeout", 240, "default"),
    ("", "OPTION_PREDICT_TIMEOUT=", "predict_timeout", 240, "default"),
    ("job_queue_size=1", "SERVING_JOB_QUEUE_SIZE=500", "job_queue_size", 1, "line 1"),
    ("", "SERVING_JOB_QUEUE_SIZE=500 MAX_CONCURRENT_REQUESTS=600", "job_queue_size", 500,
     "SERVING_JOB_QUEUE_SIZE"),
    ("", "MAX_CONCURRENT_REQUESTS=600", "job_queue_size", 600, "MAX_CONCURRENT_REQUESTS"),
    ("", "SERVING_JOB_QUEUE_SIZE= MAX_CONCURRENT_REQUESTS=600", "job_queue_size", 600,
     "MAX_CONCURRENT_REQUESTS"),
    ("", "", "job_queue_size", 1000, "default"),
    ("option.entryPoint=djl_python.huggingface", "DJL_ENTRY_POINT=https://h/m.py", "entryPoint",
     None, "line 1"),
    ("", "DJL_ENTRY_POINT=https://h/m.py", "entryPoint", "https://h/m.py", "DJL_ENTRY_POINT"),
    ("", "OPTION_ENTRYPOINT=https://h/m.py", "entryPoint", "https://h/m.py", "OPTION_ENTRYPOINT"),
    ("", "OPTION_entryPoint=https://h/m.py", "entryPoint", "https://h/m.py", "OPTION_entryPoint"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("file", "environ", "name", "value", "origin"), MODEL_ORDER, ids=lambda part: str(part) or "-"
)
def test_model_keys_take_file_over_environment(
    file: str, environ: str, name: str, value: object, origin: str, explained: ExplainRun
) -> None:
    """Each pair of neighbours in the order for model keys, with the origin of the winner."""
    run = explained(file, environ)
    assert run.server[name] == value
    assert str(run.option(name)["origin"]).endswith(origin)


def test_server_keys_take_environment_over_flags_over_file(tmp_path: Path) -> None:
    """SERVING_* beats -s and -m, which beat config.properties, which beats the default."""
    config = tmp_path / "config.properties"
    config.write_text(
        "model_store=/c\nload_models=c=/c\nmax_request_size=5\nchunked_read_timeout=7"
    )
    environ = {"SERVING_MODEL_STORE": "/e", "SAGEMAKER_MAX_REQUEST_SIZE": "9"}
    flags = CommandLine(config_file=str(config), model_store="/f", models="f=/f")
    settings = load_settings(environ, flags)
    assert settings.server.model_store == "/e"
    assert settings.server.load_models == "f=/f"
    assert settings.server.max_request_size == 9
    assert settings.server.chunked_read_timeout == 7
    assert settings.server.details["chunked_read_timeout"].origin == Origin(
        OriginKind.FILE, str(config), 4
    )
    assert settings.server.request_id_header_key == "x-request-id"


REQUEST_SIZES = (
    ("SAGEMAKER_MAX_REQUEST_SIZE=10 SERVING_MAX_REQUEST_SIZE=5", 10, 0),
    ("SAGEMAKER_MAX_PAYLOAD_IN_MB=2", 2 << 20, 0),
    ("SAGEMAKER_MAX_REQUEST_SIZE=10 SAGEMAKER_MAX_PAYLOAD_IN_MB=2", 10, 1),
    ("SAGEMAKER_MAX_REQUEST_SIZE=ten SERVING_MAX_REQUEST_SIZE=5", 5, 1),
    ("SAGEMAKER_MAX_PAYLOAD_IN_MB=1.5", 64 << 20, 1),
)


@pytest.mark.parametrize(("environ", "size", "warnings"), REQUEST_SIZES)
def test_sagemaker_limits_override_the_request_size(
    environ: str, size: int, warnings: int, explained: ExplainRun
) -> None:
    """Bytes before MiB before everything else; a bad number is a warning."""
    run = explained("", environ)
    assert run.server["max_request_size"] == size
    assert len(run.warnings) == warnings


ADDRESSES = (
    ("", (), "http://127.0.0.1:8080", "default"),
    ("SERVING_INFERENCE_ADDRESS=http://0.0.0.0:9", (), "http://0.0.0.0:9",
     "SERVING_INFERENCE_ADDRESS"),
    ("SERVING_INFERENCE_ADDRESS=0.0.0.0:9", ("--port", "0"), "http://0.0.0.0:0",
     "--port, SERVING_INFERENCE_ADDRESS"),
    ("SAGEMAKER_BIND_TO_PORT=7", (), "http://127.0.0.1:7", "SAGEMAKER_BIND_TO_PORT"),
    ("SAGEMAKER_BIND_TO_PORT=7", ("--port", "8"), "http://127.0.0.1:8", "--port"),
    ("", ("--host", "::1", "--port", "8"), "http://[::1]:8", "--host, --port"),
)  # fmt: skip


@pytest.mark.parametrize(("environ", "flags", "address", "origin"), ADDRESSES)
def test_our_flags_win_for_host_and_port(
    environ: str, flags: tuple[str, ...], address: str, origin: str, explained: ExplainRun
) -> None:
    """--port, then SAGEMAKER_BIND_TO_PORT, then the configured address."""
    run = explained("", environ, *flags)
    assert run.server["inference_address"] == address
    assert run.option("inference_address")["origin"] == origin


ALIASES = (
    ("MAX_BATCH_SIZE=16", "max_num_seqs", 16),
    ("MAX_BATCH_PREFILL_TOKENS=64", "max_num_batched_tokens", 64),
    ("HF_MODEL_TRUST_REMOTE_CODE=true", "trust_remote_code", True),
    ("HF_MODEL_QUANTIZE=awq", "quantization", "awq"),
    ("SM_NUM_GPUS=2", "tensor_parallel_size", 2),
    ("SM_NUM_GPUS=2 TENSOR_PARALLEL_DEGREE=1", "tensor_parallel_size", 1),
    ("SM_NUM_GPUS=2 OPTION_TENSOR_PARALLEL_DEGREE=4", "tensor_parallel_size", 4),
    ("SM_NUM_GPUS=2 OPTION_TENSOR_PARALLEL_SIZE=4", "tensor_parallel_size", 4),
    ("CUDA_MEMORY_FRACTION=0.5", "gpu_memory_utilization", 0.5),
    ("ENABLE_CUDA_GRAPHS=true", "enforce_eager", False),
    ("ENABLE_CUDA_GRAPHS=True", "enforce_eager", True),
    ("ENABLE_CUDA_GRAPHS=true OPTION_ENFORCE_EAGER=true", "enforce_eager", True),
    ("PIPELINE_PARALLEL_DEGREE=2", "pipeline_parallel_size", 2),
)


@pytest.mark.parametrize(("environ", "argument", "value"), ALIASES)
def test_alias_variable_fills_its_target(
    environ: str, argument: str, value: object, explained: ExplainRun
) -> None:
    """Table 2.2: copied when non-empty, and only while the target is unset or empty."""
    run = explained("", environ)
    assert run.engine_args[argument] == value
    assert run.exit_code == 0


UNSET = (  # file, environment, argument, value
    ("option.tensor_parallel_degree=", "TENSOR_PARALLEL_DEGREE=2", "tensor_parallel_size", 2),
    ("option.tensor_parallel_size=", "TENSOR_PARALLEL_DEGREE=2", "tensor_parallel_size", 2),
    ("", "OPTION_TENSOR_PARALLEL_DEGREE=None TENSOR_PARALLEL_DEGREE=2", "tensor_parallel_size", 2),
    ("", "TENSOR_PARALLEL_DEGREE=None SM_NUM_GPUS=2", "tensor_parallel_size", 2),
    ("", "OPTION_MAX_ROLLING_BATCH_SIZE=None MAX_BATCH_SIZE=7", "max_num_seqs", 7),
    ("option.max_rolling_batch_size=", "OPTION_MAX_ROLLING_BATCH_SIZE=7", "max_num_seqs", 256),
    ("option.max_rolling_batch_size=None", "MAX_BATCH_SIZE=7", "max_num_seqs", 256),
)


@pytest.mark.parametrize(("file", "environ", "argument", "value"), UNSET)
def test_unset_text_hides_only_what_its_key_hides(
    file: str, environ: str, argument: str, value: object, explained: ExplainRun
) -> None:
    """Aliases and late variables count; a key of the file hides variables even without a value."""
    run = explained(file, environ, "--gpus", "4")
    assert run.engine_args[argument] == value
    assert run.exit_code == 0


UNSET_ON_THE_SERVER = (
    ("OPTION_PREDICT_TIMEOUT=None PREDICT_TIMEOUT=7", "predict_timeout", 7),
    ("SERVING_JOB_QUEUE_SIZE=None MAX_CONCURRENT_REQUESTS=600", "job_queue_size", 600),
)


@pytest.mark.parametrize(("environ", "name", "value"), UNSET_ON_THE_SERVER)
def test_unset_setting_leaves_room_for_the_next(
    environ: str, name: str, value: object, explained: ExplainRun
) -> None:
    """The text `None` means unset here, too."""
    assert explained("", environ).server[name] == value


MODEL_IDS = (
    ("option.model_id=f/f", "HF_MODEL_ID=h/h OPTION_MODEL_ID=o/o", (), "f/f", ("h/h", "o/o")),
    ("", "HF_MODEL_ID=h/h OPTION_MODEL_ID=o/o", (), "h/h", ("o/o",)),
    ("", "OPTION_MODEL_ID=o/o", (), "o/o", ()),
    ("option.model_id=f/f", "HF_MODEL_ID=f/f", (), "f/f", ()),
    ("option.model_id=f/f", "HF_MODEL_ID=h/h", ("--model", "c/c"), "c/c", ("f/f", "h/h")),
)


@pytest.mark.parametrize(("file", "environ", "flags", "model", "others"), MODEL_IDS)
def test_first_model_id_wins_and_a_warning_names_the_others(
    file: str,
    environ: str,
    flags: tuple[str, ...],
    model: str,
    others: tuple[str, ...],
    explained: ExplainRun,
) -> None:
    """--model > serving.properties > HF_MODEL_ID > OPTION_MODEL_ID."""
    run = explained(file, environ, *flags)
    assert run.engine_args["model"] == model
    assert len(run.warnings) == bool(others)
    assert all(other in run.warnings[0] for other in others)


def test_variable_behind_the_file_is_warned_of(explained: ExplainRun) -> None:
    """With both values and places; not one that says the same, and no secret is shown."""
    file = "option.dtype=fp32\noption.max_loras=2\noption.hf_token=hf_aaa"
    run = explained(file, "OPTION_DTYPE=fp16 OPTION_MAX_LORAS=2 OPTION_HF_TOKEN=hf_bbb")
    said = [one for one in run.warnings if "comes first" in one]
    wanted = "option.dtype=fp16 (OPTION_DTYPE) is not used: option.dtype=fp32 ("
    assert [one for one in said if "dtype" in one] == [one for one in said if wanted in one] != []
    assert not [one for one in said if "max_loras" in one]
    assert "option.hf_token=*** (OPTION_HF_TOKEN) is not used" in " ".join(said)
    assert not [one for one in run.warnings if "hf_aaa" in one or "hf_bbb" in one]


def test_hub_variables_beat_option_variables_and_lose_to_the_file(explained: ExplainRun) -> None:
    """HF_REVISION > OPTION_REVISION and HF_TASK > OPTION_TASK; the file beats both."""
    environ = "HF_MODEL_ID=a/b HF_REVISION=h OPTION_REVISION=o HF_TASK=embed OPTION_TASK=generate"
    run = explained("", environ)
    assert (run.engine_args["revision"], run.engine_args["runner"]) == ("h", "pooling")
    assert explained("option.revision=f", environ).engine_args["revision"] == "f"


def test_masked_value_shows_that_it_is_masked(explained: ExplainRun) -> None:
    """A shadowed value is named in the note of the one that counts."""
    run = explained("option.max_loras=2", "OPTION_MAX_LORAS=3")
    assert "option.max_loras=3 (OPTION_MAX_LORAS)" in run.option("max_loras")["note"]


def test_prefix_properties_apply_only_without_a_file_in_the_store(tmp_path: Path) -> None:
    """One serving.properties applies; a second one is named in a warning."""
    fetched = parse_properties("option.max_loras=7", "s3://b/p/serving.properties")
    environ = {"SERVING_MODEL_STORE": str(tmp_path), "HF_MODEL_ID": "s3://b/p/"}
    assert load_settings(environ, extra_properties=fetched).model.max_loras == 7
    (tmp_path / "serving.properties").write_text("option.max_loras=2")
    settings = load_settings(environ, extra_properties=fetched)
    assert settings.model.max_loras == 2
    assert [text for text in settings.warnings if "s3://b/p/serving.properties" in text]


def test_directory_named_as_model_brings_its_own_properties(tmp_path: Path) -> None:
    """A local HF_MODEL_ID is a model directory, and so is --model."""
    (tmp_path / "serving.properties").write_text("option.max_loras=3")
    environ = {"SERVING_MODEL_STORE": "/nonexistent"}
    hub = load_settings(environ | {"HF_MODEL_ID": str(tmp_path)})
    flag = load_settings(environ, CommandLine(model=str(tmp_path)))
    assert hub.model.max_loras == flag.model.max_loras == 3


def test_demo_serves_the_embedded_directory_whatever_is_configured() -> None:
    """--demo wins over every other source of a model."""
    environ = {"HF_MODEL_ID": "a/b", "HF_REVISION": "r", "SERVING_LOAD_MODELS": "NONE"}
    settings = load_settings(environ, CommandLine(demo=True))
    assert settings.model.model_id.endswith("demo/model")
    assert settings.model.revision is None
    assert settings.server.load_models == "ALL"


def test_unreadable_config_file_is_an_error() -> None:
    """A file named on the command line must exist."""
    settings = load_settings({}, CommandLine(config_file="/nonexistent/config.properties"))
    assert any("/nonexistent/config.properties" in text for text in settings.errors)


def test_option_env_is_exported(explained: ExplainRun) -> None:
    """`option.env` splits on commas, then at the first `=`."""
    settings = load_settings({"OPTION_ENV": "A=1,B=x=y"})
    assert settings.environment_exports == {"A": "1", "B": "x=y"}
    assert "option.env" in explained("", "OPTION_ENV=A").errors[0]


@pytest.mark.parametrize("name", ["OPTION_HF_TOKEN", "SM_VLLM_HF_TOKEN"])
def test_token_of_an_engine_argument_is_the_fetches_token(name: str) -> None:
    """The argument of vLLM reaches config.json only; weights and adapters need it, too."""
    settings = load_settings({name: "hf_of_argument", "HF_TOKEN": "hf_other", "OPTION_ENV": "A=1"})
    assert settings.environment_exports == {"A": "1", "HF_TOKEN": "hf_of_argument"}
