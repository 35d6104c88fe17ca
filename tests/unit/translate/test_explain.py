"""`explain` itself: formats, secrets, the modules it loads and the calls it makes."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lmi_vllm.commands import explain as explain_command
from lmi_vllm.config.secrets import is_secret, mask_value
from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.messages import MediaPolicy, Origin, OriginKind, RequestLimits
from lmi_vllm.translate.devices import Devices, detect_devices
from lmi_vllm.translate.explain import FORMATS, Explanation, as_document, formatted
from tests.support.assembled import (
    explain,
    load_settings,
    translate,
    translate_start,
)
from tests.unit.conftest import Explained, ExplainRun

PROGRAM = """
import argparse, sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
from lmi_vllm.assembly import configuration
from lmi_vllm.commands import explain
parser = argparse.ArgumentParser()
explain.add_arguments(parser, configuration())
rooms = {f"lmi_vllm.{room}" for room in ("server", "web", "inference", "adapters", "engine")}
serving = rooms & set(sys.modules)
heavy = {"torch", "vllm", "transformers", "aiohttp", "boto3", "botocore", "huggingface_hub"} | rooms
model, *flags = sys.argv[1:]
flags = parser.parse_args(["--format", "json", *flags])
code = explain.run(flags, {"HF_MODEL_ID": model, "LMI_X": "1"}, configuration())
sys.setprofile(None)
loaded = {name.split(".")[0] for name in sys.modules} | serving
print(calls, *sorted(heavy & loaded), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("model", [(str(DEMO_MODEL_DIR),), ("a/b", "--offline")])
def test_explain_is_cheap_and_imports_nothing_heavy(model: tuple[str, ...]) -> None:
    """It makes some 330,000 calls, imports included: no library for serving, no room for it.

    Calls are counted, since they do not depend on the machine. The bound leaves room for a hundred
    more options, not for reading the table twice.
    """
    done = subprocess.run([sys.executable, "-c", PROGRAM, *model], capture_output=True, check=True)
    assert json.loads(done.stdout)["engine_args"]["model"] == model[0]
    calls, *heavy = done.stderr.decode().split()
    assert heavy == []
    assert int(calls) < 375_000


def test_document_has_the_promised_shape(explained: ExplainRun) -> None:
    """Six keys; an option has six; warnings and errors are sentences."""
    run = explained("option.bedrock_compat=4\noption.dtype=int8", "HF_MODEL_ID=a/b")
    names = ["engine_args", "server", "options", "warnings", "errors", "checked"]
    assert list(run.document) == names
    keys = {"name", "value", "origin", "effect", "target", "note"}
    assert all(set(row) == keys for row in run.document["options"])
    assert all(isinstance(text, str) for text in (*run.warnings, *run.errors))
    row = run.option("bedrock_compat")
    assert (row["value"], row["effect"]) == ("4", "warns")
    assert row["origin"].endswith("serving.properties line 1")
    assert run.option("max_rolling_batch_size")["target"] == "max_num_seqs"


def test_translated_value_is_shown_beside_the_given_one(explained: ExplainRun) -> None:
    """A value that is rounded or renamed says what it became."""
    assert (
        "max_lora_rank=32" in explained("option.max_lora_rank=24").option("max_lora_rank")["note"]
    )


def test_missing_model_is_reported_and_no_error(explained: ExplainRun) -> None:
    """Configuration can be explained before there is a model."""
    run = explained()
    assert run.exit_code == 0
    assert "no model found" in run.option("model_id")["note"]
    assert "model" not in run.engine_args


SECRETS = {
    "HF_TOKEN": "s3cret-hub",
    "LMI_API_KEY": "s3cret-key",
    "VLLM_API_KEY": "s3cret-vllm-key",
    "OPTION_HF_TOKEN": "s3cret-option",
    "OPTION_ENV": "A=1,AWS_SECRET_ACCESS_KEY=s3cret-env,MY_PASSWORD=s3cret-pass",
    "OPTION_KV_TRANSFER_CONFIG": '{"kv_role": "kv_both", "api_key": "s3cret-json"}',
    "HF_MODEL_ID": "s3://user:s3cret-login@b/p?X-Amz-Signature=s3cret-sig",
    "OPTION_MODEL_ID": "https://u:s3cret-other@h/m",
    "LMI_ACCESS_TOKEN": "s3cret-unknown",
    "OPTION_SECRET": "s3cret-unknown-option",
    "OPTION_API_KEY": "s3cret-front-end",
    "OPTION_SPECULATIVE_CONFIG": '{"token": "s3cret-broken"',
    "LMI_CACHE_URI": "s3://key:s3cret-uri@bucket/x",
}


@pytest.mark.parametrize("form", FORMATS)
def test_no_format_shows_a_secret(form: str) -> None:
    """Values, nested values, URLs, unknown names, errors and warnings are all masked."""
    settings = load_settings(SECRETS)
    explanation = explain(translate_start(settings, SECRETS, Devices(1)))
    text = FORMATS[form](explanation)
    assert "s3cret" not in text
    assert "***" in text


NAMES = (
    ("HF_TOKEN", True), ("api_key", True), ("LMI_API_KEY_FILE", False), ("keystore_pass", True),
    ("AWS_SECRET_ACCESS_KEY", True), ("max_num_batched_tokens", False), ("tokenizer_mode", False),
    ("monkey", False), ("passenger", False), ("MY_CREDENTIALS", True), ("db-password", True),
)  # fmt: skip


@pytest.mark.parametrize(("name", "secret"), NAMES)
def test_secret_names_hold_a_whole_word(name: str, secret: bool) -> None:
    """The word must stand between separators."""
    assert is_secret(name) is secret
    assert (mask_value(name, "x") == "***") is secret


def test_table_and_markdown_hold_every_option_and_argument(explained: ExplainRun) -> None:
    """The two readable formats say the same as the JSON."""
    environ = {"HF_MODEL_ID": "a/b", "SERVING_MODEL_STORE": "/nonexistent"}
    explanation = explain(translate_start(load_settings(environ), environ, Devices(4)))
    for form in ("table", "markdown"):
        text = formatted(explanation, form, is_whole=True)
        assert all(str(row["name"]) in text for row in explanation.options)
        assert all(name in text for name in explanation.engine_args)


def test_table_shows_what_is_set_and_counts_the_rest(explained: ExplainRun) -> None:
    """The origin keeps its file and line; a default that LMI's guides have otherwise is shown."""
    folder = "/srv/" + "deep/" * 20
    origin = Origin(OriginKind.FILE, f"{folder}serving.properties", 12)
    row = {"effect": "ours", "target": "", "note": "A note. " * 20}
    options = (
        {"name": "written", "value": "1", "origin": str(origin), **row},
        {"name": "surprising", "value": 2, "origin": "default", **row},
        {"name": "quiet", "value": 3, "origin": "default", **row},
    )
    explanation = Explanation({}, {}, options, (), (), changed_defaults=frozenset({"surprising"}))
    short, whole = (
        formatted(explanation, "table", is_whole=is_whole) for is_whole in (False, True)
    )
    assert "deep/serving.properties line 12" in short
    assert max(map(len, short.splitlines())) <= 110
    assert "surprising  2" in short
    assert "1 more options are at their defaults: --all shows them" in short
    assert "quiet  3" in whole
    assert "quiet" not in short
    assert "--all" not in whole
    assert as_document(explanation).keys() == explained("").document.keys()


def test_text_that_is_no_utf8_is_shown_as_escapes() -> None:
    """Any bytes may stand in the environment; the answer stays readable and valid JSON."""
    environ = {
        "OPTION_REVISION": "caf\udce9",
        "PYTHONIOENCODING": "ascii",
        "SERVING_LOAD_MODELS": "NONE",
    }
    command = [sys.executable, "-m", "lmi_vllm", "explain", "--format"]
    for form in FORMATS:
        done = subprocess.run([*command, form], env=environ, capture_output=True, check=True)
        assert b"caf" in done.stdout
        if form == "json":
            assert json.loads(done.stdout)["engine_args"]["revision"] == "caf\udce9"


def test_quantize_beside_a_quantized_checkpoint_is_one_warning(
    tmp_path: Path, explained: ExplainRun
) -> None:
    """Passed on, and said to be better left out."""
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    run = explained("", {"HF_MODEL_ID": str(tmp_path), "OPTION_QUANTIZE": "awq"})
    assert run.engine_args["quantization"] == "awq"
    assert ["better left out" in text for text in run.warnings] == [True]
    assert explained("", {"HF_MODEL_ID": str(tmp_path)}).warnings == []


def test_devices_follow_cuda_visible_devices() -> None:
    """An empty or negative list hides every GPU."""
    for visible in ("", "-1", " "):
        assert detect_devices({"CUDA_VISIBLE_DEVICES": visible}).gpu_count == 0
    assert detect_devices({"VLLM_CPU_OMP_THREADS_BIND": "0-1|2-3"}).cpu_rank_limit is None


def test_serving_profile_has_the_settings_of_requests(tmp_path: Path) -> None:
    """Every field comes from its setting."""
    environ = {
        "SERVING_MODEL_STORE": str(tmp_path), "OPTION_OUTPUT_FORMATTER": "sse",
        "OPTION_TGI_COMPAT": "true", "OPTION_STREAM_LOGPROBS": "false", "OPTION_NORMALIZE": "0",
        "OPTION_ENABLE_LORA": "1", "MAX_CONCURRENT_REQUESTS": "5", "PREDICT_TIMEOUT": "7",
        "SERVING_CHUNKED_READ_TIMEOUT": "8", "SERVING_MAX_REQUEST_SIZE": "9",
        "OPTION_SERVED_MODEL_NAME": "a,b", "OPTION_TASK": "text-embedding",
        "OPTION_CHAT_TEMPLATE": "t", "OPTION_ENABLE_AUTO_TOOL_CHOICE": "true",
        "OPTION_TOOL_CALL_PARSER": "hermes", "OPTION_REASONING_PARSER": "qwen3",
        "LMI_MAX_SEQUENCES": "1", "LMI_MAX_STOP_STRINGS": "2", "LMI_MAX_STOP_LENGTH": "3",
        "LMI_MAX_LOGIT_BIAS": "4", "LMI_MAX_GRAMMAR_SIZE": "5", "LMI_GRAMMAR_TIMEOUT": "0",
        "OPTION_MAX_LOGPROBS": "7", "OPTION_SCHEDULING_POLICY": "priority",
        "LMI_MAX_TOKENIZE_LENGTH": "8", "LMI_MEDIA_MAX_PIXELS": "9",
        "LMI_MAX_PROMPT_LOGPROBS": "10",
    }  # fmt: skip
    settings = load_settings(environ)
    profile = translate(settings, None, Devices()).profile
    assert settings.errors == ()
    assert profile.served_names == ("a", "b")
    assert (profile.task, profile.output_formatter, profile.tgi_compat) == ("embed", "sse", True)
    assert (profile.stream_logprobs, profile.normalize, profile.enable_lora) == (False, False, True)
    assert (profile.job_queue_size, profile.max_request_size) == (5, 9)
    assert (profile.predict_timeout, profile.chunked_read_timeout) == (7.0, 8.0)
    assert profile.chat_template == "t"
    assert (profile.enable_auto_tool_choice, profile.tool_call_parser) == (True, "hermes")
    assert profile.limits == RequestLimits(1, 2, 3, 4, 5, 0.0, 7, 8, 10)
    assert profile.media == MediaPolicy(max_pixels=9)
    plain = translate(load_settings({}), None, Devices()).profile
    assert plain.served_names == ("lmi",)
    assert plain.limits == RequestLimits()
    assert (profile.uses_priority, plain.uses_priority) == (True, False)


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        *(({"quant_method": name}, name)
          for name in ("bitsandbytes", "squeezellm", "hqq", "eetq", "quanto", "bitnet", "new")),
        ({"quant_method": "BitsAndBytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes"),
        ({"load_in_8bit": False, "load_in_4bit": True}, "bitsandbytes"),
    ],
)  # fmt: skip
def test_checkpoint_that_vllm_does_not_read_is_an_error(
    quantization: dict[str, object], method: str, explained: ExplainRun, tmp_path: Path
) -> None:
    """Its config.json says so; vLLM would say it once it had started."""
    (error,) = quantized(quantization, explained, tmp_path).errors
    assert f"quantized with {method} " in error
    assert "option.quantize=fp8" in error


@pytest.mark.parametrize(
    "quantization",
    [
        *({"quant_method": name} for name in load_release().quantization_methods),
        {"quant_method": "compressed_tensors"}, {"quant_method": "auto-round"},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
        {"load_in_8bit": False}, {"quant_method": None}, {}, None,
    ],
)  # fmt: skip
def test_checkpoint_that_vllm_reads_is_none(
    quantization: object, explained: ExplainRun, tmp_path: Path
) -> None:
    """All of its own methods, and what it reads as one of them."""
    assert quantized(quantization, explained, tmp_path).errors == []


def test_methods_of_plugins_and_of_other_releases_are_not_known(
    explained: ExplainRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are left to vLLM."""
    monkeypatch.setattr("lmi_vllm.checks.model.installed_release", lambda: "9.9")
    assert quantized({"quant_method": "new"}, explained, tmp_path).errors == []
    monkeypatch.undo()
    plugin = EntryPoint("new", "new:register", "vllm.general_plugins")
    monkeypatch.setattr("lmi_vllm.checks.model.entry_points", lambda group: [plugin])
    assert quantized({"quant_method": "new"}, explained, tmp_path).errors == []


@pytest.mark.parametrize(
    ("method", "config", "is_refused"),
    [
        ("fp8", {}, True),
        ("fp8", {"quantization_config": {"quant_method": "fp8"}}, False),
        ("experts_int8", {"num_local_experts": 8}, True),
        ("bitsandbytes", {"num_local_experts": 8}, True),
        ("fp8_per_channel", {}, False),
    ],
)
def test_quantization_at_load_that_needs_a_gpu_is_refused_on_a_cpu(
    method: str, config: dict[str, object], is_refused: bool,
    explained: ExplainRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """VLLM's build for CPUs fails in a kernel once the engine has begun."""
    monkeypatch.setattr("lmi_vllm.checks.model.is_cpu_build", lambda: True)
    stated = {"architectures": ["LlamaForCausalLM"]} | config
    (tmp_path / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    environ = {"HF_MODEL_ID": str(tmp_path), "OPTION_QUANTIZE": method}
    errors = explained("", environ, "--gpus", "0").errors
    assert len(errors) == is_refused
    assert all("On this CPU leave it out, or use a checkpoint quantized" in text for text in errors)
    assert explained("", environ, "--gpus", "1").errors == []


def quantized(quantization: object, explained: ExplainRun, folder: Path) -> Explained:
    """Return what is explained of a model with that in its config.json."""
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return explained("", {"HF_MODEL_ID": str(folder)})


@pytest.mark.parametrize("stated", [[1], "awq", [], 4])
def test_quantization_that_is_no_object_is_refused(
    explained: ExplainRun, tmp_path: Path, stated: object
) -> None:
    """VLLM fails on it with an AttributeError, half a minute later."""
    (error,) = quantized(stated, explained, tmp_path).errors
    assert error.startswith(f"quantization_config in config.json is {str(stated)!r}")


def test_missing_engine_is_a_warning(
    explained: ExplainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`explain` needs no vLLM; `serve` on the same machine would end, which nothing said."""
    said = "vLLM is not installed here"
    assert not any(said in text for text in explained("", "HF_MODEL_ID=a/b").warnings)
    monkeypatch.setattr(explain_command, "find_spec", lambda _: None)
    run = explained("", "HF_MODEL_ID=a/b")
    assert any(said in text for text in run.warnings)
    assert not run.errors


def test_store_of_adapters_that_is_no_folder_is_a_warning(
    explained: ExplainRun, tmp_path: Path
) -> None:
    """It may be mounted later; an empty one is a store."""
    environ = {"HF_MODEL_ID": "a/b", "OPTION_ENABLE_LORA": "true"}
    for place, count in ((tmp_path, 0), (tmp_path / "gone", 1), (f"file://{tmp_path}/gone", 1)):
        run = explained("", {**environ, "OPTION_ADAPTER_STORE": str(place)})
        assert sum("is no folder yet" in text for text in run.warnings) == count
        assert not run.errors


def test_short_secret_does_not_hide_letters_of_words() -> None:
    """A key of one letter is hidden where it stands alone."""
    environ = {"HF_MODEL_ID": "a/b", "LMI_API_KEY": "k", "OPTION_FOO": "1", "OPTION_DTYPE": "k"}
    explanation = explain(translate_start(load_settings(environ), environ, Devices()))
    sentences = " ".join((*explanation.warnings, *explanation.errors))
    assert "OPTION_FOO is not known" in sentences
    assert "=k " not in sentences


def test_two_names_of_the_model_are_one_error() -> None:
    """With a model that is refused it is not said that there is none."""
    command = [sys.executable, "-m", "lmi_vllm", "explain", "--offline", "--format", "json"]
    environ = {"HF_MODEL_ID": "c/d", "OPTION_MODEL": "a/b"}
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    errors = json.loads(done.stdout)["errors"]
    assert ["two names of one setting" in error for error in errors] == [True]
