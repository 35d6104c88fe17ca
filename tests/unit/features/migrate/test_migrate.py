"""`migrate`: every source server, with a report that says what could not be carried over."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.config.other_servers.tgi_variables import TGI_VARIABLES
from lmi_vllm.config.properties import parse_properties
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.migrate import command as migrate
from lmi_vllm.features.migrate.environment_files import read_environment
from lmi_vllm.features.migrate.migration import as_properties, as_variables, migrate_lmi
from tests.support.assembled import CONFIGURATION, load_settings

SAMPLES = sorted((Path(__file__).parents[4] / "config" / "samples").glob("*.env"))
Migrate = Callable[..., tuple[int, Mapping[str, Any]]]


@pytest.fixture
def migrated(capsys: pytest.CaptureFixture[str]) -> Migrate:
    """Run `migrate --format json` and read its document."""

    def run(environ: Mapping[str, str], *flags: str) -> tuple[int, Mapping[str, Any]]:
        parser = argparse.ArgumentParser()
        migrate.add_arguments(parser, CONFIGURATION)
        code = migrate.run(parser.parse_args(["--format", "json", *flags]), environ, CONFIGURATION)
        return code, json.loads(capsys.readouterr().out)

    return run


TGI = (  # variable, value, what it becomes
    ("MODEL_ID", "acme/x", {"option.model_id": "acme/x"}),
    ("REVISION", "r", {"option.revision": "r"}),
    ("HF_MODEL_REVISION", "r", {"option.revision": "r"}),
    ("SHARDED", "false", {"option.tensor_parallel_degree": "1"}),
    ("SHARDED", "true", {"option.tensor_parallel_degree": "max"}),
    ("NUM_SHARD", "4", {"option.tensor_parallel_degree": "4"}),
    ("SM_NUM_GPUS", "4", {"option.tensor_parallel_degree": "4"}),
    ("QUANTIZE", "awq", {"option.quantize": "awq"}),
    ("QUANTIZE", "bitsandbytes", {"option.quantize": "fp8"}),
    ("DTYPE", "bfloat16", {"option.dtype": "bfloat16"}),
    ("KV_CACHE_DTYPE", "fp8_e4m3fn", {"option.kv_cache_dtype": "fp8_e4m3"}),
    ("MAX_CONCURRENT_REQUESTS", "64", {"job_queue_size": "64"}),
    ("MAX_TOP_N_TOKENS", "5", {"option.max_logprobs": "5"}),
    ("MAX_TOTAL_TOKENS", "4096", {"option.max_model_len": "4096"}),
    ("MAX_BATCH_PREFILL_TOKENS", "8192", {"option.max_rolling_batch_prefill_tokens": "8192"}),
    ("MAX_BATCH_SIZE", "16", {"option.max_rolling_batch_size": "16"}),
    ("CUDA_GRAPHS", "0", {"option.enforce_eager": "true"}),
    ("CUDA_GRAPHS", "1,2,4", {"option.cudagraph_capture_sizes": "1,2,4"}),
    ("CUDA_MEMORY_FRACTION", "0.8", {"option.gpu_memory_utilization": "0.8"}),
    ("TRUST_REMOTE_CODE", "true", {"option.trust_remote_code": "true"}),
    ("LORA_ADAPTERS", "a/b,c/d", {"option.lora_modules": "a/b=a/b,c/d=c/d",
     "option.enable_lora": "true"}),
    ("LORA_ADAPTERS", "a/b@main", {"option.enable_lora": "true"}),
    ("ATTENTION", "flashinfer", {"option.attention_backend": "FLASHINFER"}),
    ("USE_PREFIX_CACHING", "true", {"option.enable_prefix_caching": "true"}),
    ("LORA_ADAPTERS", "a=c/d,b=e/f", {"option.lora_modules": "a=c/d,b=e/f",
     "option.enable_lora": "true"}),
    ("PORT", "80", {"SERVING_INFERENCE_ADDRESS": "http://0.0.0.0:80"}),
    ("PAYLOAD_LIMIT", "1000", {"SERVING_MAX_REQUEST_SIZE": "1000"}),
    ("GRACEFUL_TERMINATION_TIMEOUT", "90", {"SERVING_SHUTDOWN_TIMEOUT": "90"}),
    ("CORS_ALLOW_ORIGIN", "*", {"SERVING_CORS_ALLOWED_ORIGIN": "*"}),
    ("OTLP_ENDPOINT", "http://o", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://o"}),
    ("ROPE_FACTOR", "2", {"option.hf_overrides":
     '{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}'}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text", "written"), TGI)
def test_tgi_variable_is_carried_over(
    name: str, text: str, written: dict[str, str], migrated: Migrate
) -> None:
    """The option or variable is written, and TGI's own defaults beside it."""
    code, document = migrated({"MODEL_ID": "acme/x", name: text})
    assert document["from"] == "tgi"
    assert written.items() <= {**document["properties"], **document["environment"]}.items()
    assert document["properties"]["option.tgi_compat"] == "true"
    assert (code, document["refused"]) == (0, [])


REFUSED = (
    ("QUANTIZE", "exl2"), ("QUANTIZE", "bitsandbytes-nf4"), ("NGROK", "true"),
    ("WATERMARK_GAMMA", "0.5"), ("TOKENIZER_CONFIG_PATH", "/t.json"), ("SPECULATE", "many"),
    ("MAX_TOTAL_TOKENS", "many"), ("ROPE_FACTOR", "big"), ("SHARDED", "perhaps"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_tgi_variable_is_refused_by_name(name: str, text: str, migrated: Migrate) -> None:
    """What cannot be carried over ends with 2 and a reason."""
    code, document = migrated({"MODEL_ID": "acme/x", name: text})
    assert code == 2
    assert all(step["why"] for step in document["refused"])


@pytest.mark.parametrize("name", TGI_VARIABLES)
def test_every_tgi_variable_is_reported(name: str, migrated: Migrate) -> None:
    """No variable of the launcher disappears without a message."""
    _, document = migrated({name: "1"}, "--from", "tgi")
    steps = [*document["mapped"], *document["approximated"], *document["refused"]]
    [step] = [step for step in steps if step["source"].startswith(f"{name}=")]
    assert step["becomes"] or step["why"]


VLLM = (
    (["acme/x"], {"option.model_id": "acme/x", "option.served_model_name": "acme/x",
                  "option.tensor_parallel_size": "1", "option.data_parallel_size": "1"}),
    (["vllm", "serve", "acme/x", "-tp", "2"], {"option.tensor_parallel_size": "2"}),
    (["--model=acme/x", "--max-model-len", "8k"], {"option.max_model_len": "8k"}),
    (["acme/x", "--enforce-eager"], {"option.enforce_eager": "true"}),
    (["acme/x", "--no-enable-prefix-caching"], {"option.enable_prefix_caching": "false"}),
    (["acme/x", "--served-model-name", "a", "b"], {"option.served_model_name": '["a", "b"]'}),
    (["acme/x", "--speculative-config", '{"method": "ngram"}'],
     {"option.speculative_config": '{"method": "ngram"}'}),
    (["acme/x", "--compilation-config.mode", "3", "--compilation-config.cache_dir", "/c"],
     {"option.compilation_config": '{"mode": 3, "cache_dir": "/c"}'}),
    (["acme/x", "--enable-lora"], {"option.enable_lora": "true", "option.max_loras": "1"}),
    (["acme/x", "--port", "9000"], {"SERVING_INFERENCE_ADDRESS": "http://0.0.0.0:9000"}),
    (["acme/x", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
     {"option.enable_auto_tool_choice": "true", "option.tool_call_parser": "hermes"}),
    (["acme/x", "--ssl-keyfile", "/k", "--ssl-certfile", "/c"],
     {"SERVING_PRIVATE_KEY_FILE": "/k", "SERVING_CERTIFICATE_FILE": "/c",
      "SERVING_INFERENCE_ADDRESS": "https://0.0.0.0:8000"}),
    (["acme/x", "--ssl-keyfile", "/k", "--ssl-certfile", "/c", "--port", "9"],
     {"SERVING_INFERENCE_ADDRESS": "https://0.0.0.0:9"}),
    (["acme/x", "--uds", "/run/v.sock"], {"SERVING_INFERENCE_ADDRESS": "unix:/run/v.sock"}),
    (["acme/x", "--host", "::", "--uds", "/v", "--port", "9"],
     {"SERVING_INFERENCE_ADDRESS": "unix:/v"}),
    (["acme/x", "--allowed-origins", '["a", "b"]'], {"SERVING_CORS_ALLOWED_ORIGIN": "a,b"}),
    (["acme/x", "--allowed-methods", '["POST"]'], {"SERVING_CORS_ALLOWED_METHODS": "POST"}),
    (["acme/x", "--allowed-headers", '["x-a"]'], {"SERVING_CORS_ALLOWED_HEADERS": "x-a"}),
    (["acme/x", "--api-server-count", "2"], {"LMI_FRONTEND_PROCESSES": "2"}),
    (["acme/x", "--enable-scale-out", "--middleware", "a.b", "--middleware", "c.d"],
     {"option.enable_scale_out": "true", "option.middleware": "a.b,c.d"}),
    (["acme/x", "--num-gpu-blocks-override", "-1"], {"option.num_gpu_blocks_override": "-1"}),
)  # fmt: skip


@pytest.mark.parametrize(("flags", "written"), VLLM, ids=" ".join)
def test_vllm_flags_are_carried_over(
    flags: list[str], written: dict[str, str], migrated: Migrate
) -> None:
    """Every engine flag under its own name, and vLLM's defaults where ours differ."""
    code, document = migrated({}, "--", *flags)
    assert document["from"] == "vllm"
    assert written.items() <= {**document["properties"], **document["environment"]}.items()
    assert (code, document["refused"]) == (0, [])


@pytest.mark.parametrize(
    "flags",
    [["--max-modle-len", "5"], ["--headless"], ["--max-model-len", "x"], ["--grpc"]],
    ids=" ".join,
)
def test_vllm_flags_are_refused_by_name(flags: list[str], migrated: Migrate) -> None:
    """Unknown flags, wrong values and what this server has not."""
    code, document = migrated({}, "--", "acme/x", *flags)
    assert code == 2
    assert flags[0] in document["refused"][0]["source"]


def test_sagemaker_vllm_variables_are_flags(migrated: Migrate) -> None:
    """SM_VLLM_*: lists and JSON by value, empty text for a bare switch."""
    environ = {
        "SM_VLLM_MODEL": "acme/x", "SM_VLLM_MAX_MODEL_LEN": "8k", "SM_VLLM_ENFORCE_EAGER": "",
        "SM_VLLM_TRUST_REMOTE_CODE": "true", "SM_VLLM_HF_OVERRIDES": '{"a": 1}',
        "SM_VLLM_SERVED_MODEL_NAME": "a b", "SM_VLLM_LORA_MODULES": "x=/x y=/y",
    }  # fmt: skip
    code, document = migrated(environ)
    assert (code, document["from"]) == (0, "sm-vllm")
    properties = document["properties"]
    assert properties["option.enforce_eager"] == properties["option.trust_remote_code"] == "true"
    assert properties["option.served_model_name"] == '["a", "b"]'
    assert properties["option.hf_overrides"] == '{"a": 1}'
    assert properties["option.enable_lora"] == "true"


def test_old_lmi_file_is_cleaned(tmp_path: Path, migrated: Migrate) -> None:
    """What still counts stays, stand-ins get their modern name, the rest is explained."""
    file = tmp_path / "serving.properties"
    file.write_text(
        "engine=DeepSpeed\noption.model_id=acme/x\noption.max_tokens=2048\n"
        "option.triangular_masking=true\noption.tensor_parallel_degree=2\njob_queue_size=50\n"
        "option.load_split_model=true\noption.maxtokens=5\n"
    )
    code, document = migrated({"OPTION_DTYPE": "fp16"}, "--properties", str(file))
    assert (code, document["from"]) == (2, "lmi")
    assert document["properties"] == {
        "option.model_id": "acme/x", "option.max_model_len": "2048", "option.dtype": "float16",
        "option.tensor_parallel_degree": "2", "job_queue_size": "50",
    }  # fmt: skip
    refused = " ".join(step["source"] + step["why"] for step in document["refused"])
    assert "load_split_model" in refused
    assert "maxtokens" in refused
    dropped = " ".join(step["source"] for step in document["approximated"])
    assert "triangular_masking" in dropped
    assert "engine" in dropped


def test_secrets_are_never_copied(migrated: Migrate) -> None:
    """Keys are named, not shown."""
    document = [
        migrated({"MODEL_ID": "a/b", "API_KEY": "s3cret", "NGROK_AUTHTOKEN": "s3cret"})[1],
        migrated({}, "--", "a/b", "--api-key", "s3cret", "--hf-token", "s3cret")[1],
        migrated({"SM_VLLM_API_KEY": "s3cret", "OPTION_HF_TOKEN": "s3cret"})[1],
    ]
    assert "s3cret" not in json.dumps(document)
    assert "LMI_API_KEY" in json.dumps(document)


LEFT_OUT = (  # variables or flags, the key that is to be set again
    ({"OPTION_ENV": "MY_TOKEN=s3cret,B=1"}, "option.env"),
    ({"OPTION_ENV": "MY_TOKEN=a,s3cret"}, ""),  # it cannot be read
    ({"OPTION_MODEL_ID": "https://u:s3cret@h/x"}, "option.model_id"),
    ({"OPTION_KV_TRANSFER_CONFIG": '{"kv_role": "kv_both", "secret": "s3cret"}'},
     "option.kv_transfer_config"),
    ({"MODEL_ID": "https://u:s3cret@h/x"}, "option.model_id"),
    ({"MODEL_ID": "a/b", "OTLP_ENDPOINT": "http://u:s3cret@h"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
    ({"MODEL_ID": "a/b", "LORA_ADAPTERS": "x=https://u:s3cret@h/y"}, ""),
    ({"MODEL_ID": "a/b", "TOKENIZER_CONFIG_PATH": "https://u:s3cret@h/y"}, ""),
    ({"MODEL_ID": "a/b", "SPECULATE": "https://u:s3cret@h/y"}, ""),
    (["https://u:s3cret@h/x"], "option.model_id"),
    (["a/b", "--lora-modules", "x=https://u:s3cret@h/y"], ""),
    (["a/b", "--hf-overrides.token", "s3cret"], "option.hf_overrides"),
)  # fmt: skip


@pytest.mark.parametrize(("given", "key"), LEFT_OUT, ids=str)
@pytest.mark.parametrize("form", ["text", "environment", "json"])
def test_value_with_a_secret_is_left_out(
    given: dict[str, str] | list[str],
    key: str,
    form: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """It is in no form of the result, and the report says what to set again."""
    target = tmp_path / "serving.properties"
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser, CONFIGURATION)
    flags = ["--", *given] if isinstance(given, list) else []
    words = ["--format", form, "--output", str(target), *flags]
    migrate.run(parser.parse_args(words), given if isinstance(given, dict) else {}, CONFIGURATION)
    output = capsys.readouterr().out
    assert "s3cret" not in output + target.read_text()
    assert not key or f"{key} (set it to the same value)" in output
    assert not key or key not in parse_properties(target.read_text()).by_key()


def test_model_in_a_url_with_a_login_is_no_error(migrated: Migrate) -> None:
    """What is left out is not missing: it is set beside the file."""
    assert migrated({"MODEL_ID": "https://u:s3cret@h/x"})[0] == 0
    assert migrated({}, "--", "https://u:s3cret@h/x")[0] == 0


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPTION_HF_TOKEN"])
def test_secret_of_lmi_is_named_as_left_out(name: str, migrated: Migrate) -> None:
    """A token is not copied, and the report says that it has to be set again."""
    document = migrated({"OPTION_MODEL_ID": "a/b", name: "s3cret", "OTHER_TOKEN": "s3cret"})[1]
    assert "s3cret" not in json.dumps(document)
    assert f"{name} (set it to the same value)" in json.dumps(document["mapped"])
    assert "OTHER_TOKEN" not in json.dumps(document)


@pytest.mark.parametrize("model", ["MODEL_ID", "SM_VLLM_MODEL"])
@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_token_of_the_hub_is_named_from_every_environment(
    name: str, model: str, migrated: Migrate
) -> None:
    """TGI and vLLM's image read it as LMI does: without it a gated model is not fetched."""
    document = migrated({model: "a/b", "NUM_SHARD": "1", name: "s3cret"})[1]
    assert "s3cret" not in json.dumps(document)
    assert f"{name} (set it to the same value)" in json.dumps(document["mapped"])


def test_environment_file_may_be_lines_or_json(tmp_path: Path, migrated: Migrate) -> None:
    """As `docker --env-file` takes it, or as SageMaker's Environment is written."""
    lines, document = tmp_path / "a.env", tmp_path / "b.json"
    lines.write_text("# c\nexport MODEL_ID='acme/x'\nNUM_SHARD=2\n")
    document.write_text('{"MODEL_ID": "acme/x", "NUM_SHARD": 2}')
    first = migrated({}, "--environment", str(lines))
    assert first == migrated({}, "--environment", str(document))
    assert first[1]["properties"]["option.tensor_parallel_degree"] == "2"


def test_output_is_a_file_that_reads_back_the_same(tmp_path: Path, migrated: Migrate) -> None:
    """Quotes, backslashes and newlines survive properties syntax."""
    target = tmp_path / "serving.properties"
    flags = ["acme/x", "--hf-overrides", '{"a": "b\\\\nc"}', "--chat-template", " {{ x }}\n= y"]
    _, document = migrated({}, "--output", str(target), "--", *flags)
    settings = load_settings({}, extra_properties=parse_properties(target.read_text()))
    assert settings.errors == ()
    assert settings.model.hf_overrides == {"a": "b\\nc"}
    assert settings.model.chat_template == " {{ x }}\n= y"
    assert target.read_text() == as_properties(document["properties"])


@pytest.mark.parametrize("place", ["", "missing/file.properties"])
def test_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, migrated: Migrate, place: str
) -> None:
    """A folder, and a file in none: both ended in a traceback."""
    with pytest.raises(ConfigurationError, match=f"--output {tmp_path}.* cannot be written: "):
        migrated({}, "--output", str(tmp_path / place), "--", "acme/x")


def test_text_report_names_all_three_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    """The readable form is a serving.properties with the report as comments."""
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser, CONFIGURATION)
    environ = {"MODEL_ID": "a/b", "NGROK": "true", "MAX_INPUT_TOKENS": "2"}
    assert migrate.run(parser.parse_args([]), environ, CONFIGURATION) == 2
    text = capsys.readouterr().out
    assert all(f"# {outcome}" in text for outcome in ("mapped", "approximated", "refused"))
    assert parse_properties(text).by_key()["option.model_id"].value == "a/b"


def test_report_names_an_option_and_its_place_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason repeated what stands before it."""
    file = tmp_path / "serving.properties"
    file.write_text("option.model_id=acme/x\noption.max_lors=4\noption.rolling_batch=lmi-dist\n")
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser, CONFIGURATION)
    migrate.run(parser.parse_args([str(file)]), {}, CONFIGURATION)
    report = [line for line in capsys.readouterr().out.splitlines() if f"{file} line" in line]
    assert len(report) == 3
    assert all(line.count(str(file)) == 1 for line in report)
    assert f"({file} line 2) (is not known and has no effect; closest" in "\n".join(report)
    assert "nothing to set (lmi-dist is gone" in "\n".join(report)


def test_lmi_file_as_first_argument_is_read(migrated: Migrate, tmp_path: Path) -> None:
    """`migrate serving.properties` means that file; sources are quoted as they were written."""
    file = tmp_path / "serving.properties"
    file.write_text("engine=MPI\noption.model_id=acme/x\noption.rolling_batch=lmi-dist\n")
    code, document = migrated({}, str(file))
    assert code == 0
    assert document["from"] == "lmi"
    assert document["properties"] == {"option.model_id": "acme/x"}
    sources = [step["source"] for step in document["approximated"]]
    assert any(source.startswith("engine=MPI (") for source in sources)
    assert any(source.startswith("option.rolling_batch=lmi-dist (") for source in sources)


def test_engine_that_embedded_texts_is_kept(migrated: Migrate, tmp_path: Path) -> None:
    """What is embedded, and how the answer looks, depends on it."""
    file = tmp_path / "serving.properties"
    file.write_text("engine=Rust\noption.model_id=acme/x\npooling=cls\n")
    _, document = migrated({}, str(file))
    assert document["properties"]["engine"] == "Rust"


def test_lmi_refused_option_is_written_nowhere(migrated: Migrate, tmp_path: Path) -> None:
    """What serve would stop at is refused by name and is not in the result."""
    file = tmp_path / "serving.properties"
    file.write_text("option.model_id=acme/x\noption.quantize=squeezellm\n")
    code, document = migrated({}, "--properties", str(file))
    assert code == 2
    assert document["properties"] == {"option.model_id": "acme/x"}
    (refused,) = document["refused"]
    assert refused["source"].startswith("option.quantize=squeezellm (")
    assert "re-quantize" in refused["why"]


@pytest.mark.parametrize("form", ["properties", "variables"])
def test_pairs_of_env_are_read_back(form: str) -> None:
    """`option.env` is the one mapping that is not written as JSON."""
    text = "option.model_id=a/b\noption.env=A=1,B=x=2\n"
    migration = migrate_lmi({}, parse_properties(text), CONFIGURATION)
    if form == "properties":
        assert as_properties(migration.properties) == text
        again = load_settings({}, extra_properties=parse_properties(text))
    else:
        again = load_settings(as_variables(migration)[0])
    assert (again.errors, again.model.env) == ((), {"A": "1", "B": "x=2"})


BREAKS = ("\n", "\r", "\r\n", "\u2028")


@pytest.mark.parametrize("end", BREAKS, ids=ascii)
def test_line_break_in_a_value_sets_nothing(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the settings nor in the comments: the rest of the value stays part of it."""
    template = f"{{{{ a }}}}{end}option.max_model_len=7{end}{{{{ b }}}}"
    environ = {"MODEL_ID": "a/b", "CORS_ALLOW_ORIGIN": f"a{end}option.max_model_len=8"}
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser, CONFIGURATION)
    migrate.run(parser.parse_args([]), environ, CONFIGURATION)
    migrate.run(parser.parse_args(["--", "a/b", "--chat-template", template]), {}, CONFIGURATION)
    keys = parse_properties(capsys.readouterr().out).by_key()
    assert keys["option.chat_template"].value == template
    assert "option.max_model_len" not in keys


@pytest.mark.parametrize("end", BREAKS, ids=ascii)
def test_file_of_variables_has_no_line_break(
    end: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What cannot stand in one is refused by name; all other text is read back as it is."""
    text = f"a{end}OPTION_MAX_MODEL_LEN=7"
    given, written = tmp_path / "given.json", tmp_path / "written.env"
    given.write_text(json.dumps({"OPTION_MODEL_ID": "a/b", "OPTION_CHAT_TEMPLATE": text}))
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser, CONFIGURATION)
    words = ["--format", "environment", "--environment"]
    code = migrate.run(parser.parse_args([*words, str(given)]), {}, CONFIGURATION)
    output = capsys.readouterr().out
    written.write_text(output)
    variables = read_environment(str(written))
    assert variables.pop("OPTION_MODEL_ID") == "a/b"
    if end == "\u2028":
        assert (code, variables) == (0, {"OPTION_CHAT_TEMPLATE": text})
        return
    assert (code, variables) == (2, {})
    assert "option.chat_template (a file of variables holds no line break; write it in" in output


def test_variable_with_a_line_break_is_quoted_for_a_shell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On one line, because it stands in a comment."""
    environ = {"MODEL_ID": "a/b", "CORS_ALLOW_ORIGIN": "it's\n\\n"}
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser, CONFIGURATION)
    migrate.run(parser.parse_args([]), environ, CONFIGURATION)
    assert "\n#   SERVING_CORS_ALLOWED_ORIGIN=$'it\\'s\\n\\\\n'\n" in capsys.readouterr().out


def test_built_in_handler_needs_no_name(migrated: Migrate, tmp_path: Path) -> None:
    """LMI's own handlers are what runs anyway: no `None` is written as if it were one."""
    file = tmp_path / "serving.properties"
    file.write_text("option.model_id=a/b\noption.entryPoint=djl_python.huggingface\n")
    code, document = migrated({}, "--properties", str(file))
    assert code == 0
    assert document["properties"] == {"option.model_id": "a/b"}
    assert "option.entryPoint=djl_python.huggingface" in document["approximated"][0]["source"]


def test_a_refusal_is_of_the_setting_that_it_is_about(migrated: Migrate, tmp_path: Path) -> None:
    """However its text names it: the setting is not written beside the error."""
    file = tmp_path / "serving.properties"
    file.write_text("option.model_id=a/b\noption.max_lora_rank=1024\n")
    code, document = migrated({}, "--properties", str(file))
    assert (code, document["properties"]) == (2, {"option.model_id": "a/b"})
    (step,) = document["refused"]
    assert step["source"].startswith("option.max_lora_rank=1024")
    assert "the most vLLM has" in step["why"]


def test_flags_after_a_leading_file_are_ours(migrated: Migrate, tmp_path: Path) -> None:
    """`migrate FILE --output NEW` writes the new file; it asks vLLM for no flag `--output`."""
    file, new = tmp_path / "serving.properties", tmp_path / "new.properties"
    file.write_text("option.model_id=a/b\n")
    code, document = migrated({}, str(file), "--output", str(new))
    assert (code, document["from"]) == (0, "lmi")
    assert new.read_text() == "option.model_id=a/b\n"


def test_server_setting_without_effect_is_not_carried(migrated: Migrate, tmp_path: Path) -> None:
    """It would stand in the new file as if it did something."""
    file = tmp_path / "serving.properties"
    file.write_text("engine=Python\noption.model_id=a/b\nmax_batch_delay=100\n")
    code, document = migrated({}, "--properties", str(file))
    assert (code, document["properties"]) == (0, {"option.model_id": "a/b"})
    reasons = {step["source"].split("=")[0]: step["why"] for step in document["approximated"]}
    assert reasons["max_batch_delay"] == "requests never wait for a batch"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SERVING_FAIL_FAST", "true"),
        ("SERVING_SHUTDOWN_TIMEOUT", "60"),
        ("SERVING_CORS_ALLOWED_ORIGIN", "*"),
        ("SERVING_CHUNKED_READ_TIMEOUT", "30"),
    ],
)
def test_setting_of_the_environment_stays_one(name: str, text: str, migrated: Migrate) -> None:
    """In the file it would be an unknown name, and lost with a warning."""
    _, document = migrated({name: text, "OPTION_MODEL_ID": "a/b"})
    assert document["properties"] == {"option.model_id": "a/b"}
    assert document["environment"] == {name: text}


def read_variables(text: str) -> dict[str, str]:
    """The variables of an env file."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_environment_format_keeps_the_meaning(
    sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variables in, variables out: every option has the value it had."""
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser, CONFIGURATION)
    words = ["--from", "lmi", "--format", "environment", "--environment", str(sample)]
    assert migrate.run(parser.parse_args(words), {}, CONFIGURATION) == 0
    before = load_settings(read_variables(sample.read_text()))
    after = load_settings(read_variables(capsys.readouterr().out) | {"LMI_STRICT": "true"})
    assert not after.errors
    for name, setting in before.model.details.items():
        assert after.model.details[name].value == setting.value, name


def test_settings_without_a_variable_stay_in_the_file(tmp_path: Path) -> None:
    """`maxWorkers` stands in serving.properties alone; the rest is variables."""
    text = "option.model_id=a/b\nmaxWorkers=2\njob_queue_size=9\n"
    migration = migrate_lmi({}, parse_properties(text, "serving.properties"), CONFIGURATION)
    variables, rest = as_variables(migration)
    assert variables == {"OPTION_MODEL_ID": "a/b", "SERVING_JOB_QUEUE_SIZE": "9"}
    assert rest == {"maxWorkers": "2"}


def reported(tmp_path: Path, migrated: Migrate, *lines: str) -> str:
    """The report of a migration of these variables."""
    given = tmp_path / "given.env"
    given.write_text("\n".join(lines), encoding="utf-8")
    return json.dumps(migrated({}, "--environment", str(given))[1])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["OPTION_MAX_MODEL_LEN=None"], "None is no value: the variable counts as unset"),
        (["OPTION_DTYPE=nothing"], "it cannot be used, see below"),
        (["HF_REVISION=v1", "OPTION_REVISION=v1"], "says the same, and counts"),
        (["HF_REVISION=v1", "OPTION_REVISION=v2"], "option.revision=v1 (HF_REVISION) counts"),
        (
            ["SAGEMAKER_BIND_TO_PORT=9000", "SERVING_INFERENCE_ADDRESS=http://0.0.0.0:8080"],
            "SERVING_INFERENCE_ADDRESS) counts",
        ),
    ],
)
def test_variable_that_does_not_count_is_reported_with_what_does(
    tmp_path: Path, migrated: Migrate, lines: list[str], said: str
) -> None:
    """`another value counts` was said of all of them."""
    assert said in reported(tmp_path, migrated, "HF_MODEL_ID=a/b", *lines)


def test_tgi_s_own_switch_of_graphs_counts_beside_lmi_s(tmp_path: Path, migrated: Migrate) -> None:
    """ENABLE_CUDA_GRAPHS was kept as a variable that is not read; it is, and said the opposite."""
    lines = ("MODEL_ID=a/b", "NUM_SHARD=1", "CUDA_GRAPHS=0", "ENABLE_CUDA_GRAPHS=true")
    assert "option.enforce_eager=true counts" in reported(tmp_path, migrated, *lines)
    alone = reported(tmp_path, migrated, "HF_MODEL_ID=a/b", "CUDA_GRAPHS=0")
    assert "kept; this server does not read it" in alone


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["SM_VLLM_MAX_LORAS=2", "OPTION_MAX_LORAS=3"], "option.max_loras=2 counts"),
        (["SM_VLLM_SEED=2", "OPTION_MAX_LORAS=3"], "sm-vllm does not read it; set it here"),
        (["SM_VLLM_MAX_NUM_SEQS=2", "OPTION_MAX_ROLLING_BATCH_SIZE=3"], "max_num_seqs=2 counts"),
    ],
)
def test_option_of_ours_beside_another_server_s_is_in_conflict(
    tmp_path: Path, migrated: Migrate, lines: list[str], said: str
) -> None:
    """The report said that it counts, and the file had the other value."""
    assert said in reported(tmp_path, migrated, "SM_VLLM_MODEL=a/b", *lines)


def test_sizes_of_graphs_count_before_the_older_switch(tmp_path: Path, migrated: Migrate) -> None:
    """Both were written: sizes to capture, and no graphs."""
    lines = ("MODEL_ID=a/b", "NUM_SHARD=1", "CUDA_GRAPHS=1,2", "ENABLE_CUDA_GRAPHS=false")
    report = reported(tmp_path, migrated, *lines)
    assert "option.cudagraph_capture_sizes=1,2 counts" in report
    assert '"ENABLE_CUDA_GRAPHS": "false"' not in report
