"""The command lines and variables of other servers' deployments mean the same here.

Each row is what a chart, an operator or an image's entry point starts, without the placeholders.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

from lmi_vllm.assembly import configuration
from lmi_vllm.cli import parse
from lmi_vllm.commands.explain import command_line_of
from lmi_vllm.config.settings import Settings
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.features.adapter_store.settings import AdapterStoreSettings
from lmi_vllm.features.image.__main__ import as_verb
from lmi_vllm.features.image.launchers import as_ours
from lmi_vllm.features.request_log.settings import RequestLogSettings

Started = Callable[..., Settings]
MODEL = str(DEMO_MODEL_DIR)
KSERVE = [
    "vllm", "serve", MODEL, "--served-model-name", "assistant", "--port", "8000",
    "--shutdown-timeout", "45", "--disable-uvicorn-access-log",
]  # fmt: skip
TLS = [
    "--enable-ssl-refresh", "--ssl-certfile", "/run/tls/tls.crt", "--ssl-keyfile",
    "/run/tls/tls.key",
]  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """Return the settings of a command in our image, with these variables."""

    def start(words: list[str], environ: Mapping[str, str] = MappingProxyType({})) -> Settings:
        if words:
            words, environ = as_ours(words, environ)
        parsed = parse(as_verb(words, environ) if words else ["serve"])
        options = configuration().options
        store = {"SERVING_MODEL_STORE": str(tmp_path), **environ}
        return configuration().load(store, command_line_of(parsed, options))

    return start


def test_kserve_s_template(started: Started) -> None:
    """LLMInferenceService without TLS: the port, the name and the drain are those it asks for."""
    settings = started(KSERVE)
    assert not settings.errors
    assert settings.server.inference_address == "http://0.0.0.0:8000"
    assert settings.server.shutdown_timeout == 45
    assert settings.model.served_model_name == ["assistant"]
    assert settings.model.model_id == MODEL
    assert settings.model.details.served_model_name.origin.name == "--served-model-name"
    assert settings.feature(RequestLogSettings).disable_uvicorn_access_log


SAMPLES = Path(__file__).parents[2] / "config" / "kubernetes"


def container_of(name: str) -> tuple[list[str], dict[str, str]]:
    """Return the words and the variables of a sample's container."""
    manifest = yaml.safe_load((SAMPLES / name).read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    environ = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return [*container.get("command", []), *container.get("args", [])], environ


def test_sample_of_a_deployment_of_vllm_serve(started: Started) -> None:
    """The port of its probes, the model's own name, the flags."""
    settings = started(*container_of("from-vllm-serve.yaml"))
    assert not settings.errors
    assert not settings.warnings
    assert settings.server.inference_address == "http://0.0.0.0:8000"
    assert settings.model.model_id == "acme/assistant-8b"
    assert settings.model.max_model_len == 8192
    assert settings.model.served_model_name == ["acme/assistant-8b"]


def test_sample_of_a_deployment_of_tgi(started: Started) -> None:
    """The launcher's arguments and variables are read, and answers are TGI's."""
    settings = started(*container_of("from-tgi.yaml"))
    assert not settings.errors
    assert not settings.warnings
    assert settings.server.inference_address == "http://0.0.0.0:80"
    assert settings.model.tgi_compat
    assert settings.model.tensor_parallel_degree == 2
    assert settings.server.job_queue_size == 256


def test_kserve_s_template_with_tls_and_adapters(started: Started) -> None:
    """The certificates of the pod, and its adapters as JSON."""
    adapter = '{"name": "sql", "path": "/mnt/lora/sql", "base_model_name": "assistant"}'
    settings = started([*KSERVE, *TLS, "--enable-lora", "--lora-modules", adapter])
    assert not settings.errors
    assert settings.server.inference_address == "https://0.0.0.0:8000"
    assert settings.model.lora_modules == {"sql": "/mnt/lora/sql"}
    assert settings.model.enable_lora


def test_kserve_s_vllm_runtime(started: Started) -> None:
    """`python -m vllm.entrypoints.openai.api_server`, with underscores and without."""
    command = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    settings = started([*command, "--port=8080", f"--model={MODEL}", "--served_model_name=m"])
    assert not settings.errors
    assert settings.server.inference_address == "http://0.0.0.0:8080"
    assert settings.model.served_model_name == ["m"]


def test_production_stack_s_chart(started: Started) -> None:
    """Everything by flags; what is not said is as vLLM has it: one GPU, and the model's name."""
    settings = started([
        "vllm", "serve", MODEL, "--host", "0.0.0.0", "--port", "8000", "--no-enable-prefix-caching",
        "--max-model-len", "1024", "--dtype", "float32", "-tp", "1", "--enable-auto-tool-choice",
        "--tool-call-parser", "hermes", "--compilation-config.mode", "0",
    ])  # fmt: skip
    assert not settings.errors
    assert settings.model.max_model_len == 1024
    assert settings.model.served_model_name == [MODEL]
    assert settings.model.enable_prefix_caching is False
    assert settings.model.arguments["compilation_config"] == {"mode": 0}


def test_hyperpod_s_operator(started: Started) -> None:
    """A folder and flags are the arguments of the image."""
    settings = started([MODEL, "--max-model-len", "512"])
    assert not settings.errors
    assert settings.model.model_id == MODEL
    assert settings.model.max_model_len == 512


def test_sagemaker_s_vllm_images(started: Started) -> None:
    """SM_VLLM_* are settings, below our own variables; `explain` names them."""
    environ = {
        "SM_VLLM_MODEL": MODEL,
        "SM_VLLM_MAX_MODEL_LEN": "64",
        "SM_VLLM_SERVED_MODEL_NAME": "a b",
        "SM_VLLM_DTYPE": "float32",
        "OPTION_DTYPE": "bfloat16",
    }
    settings = started([], environ)
    assert not settings.errors
    assert settings.model.model_id == MODEL
    assert settings.model.served_model_name == ["a", "b"]
    assert settings.model.details.max_model_len.origin.name == "SM_VLLM_MAX_MODEL_LEN"
    assert settings.model.dtype == "bfloat16"


def test_tgi_s_launcher_on_sagemaker(started: Started) -> None:
    """Its own variables, where they name the model."""
    environ = {"MODEL_ID": "acme/assistant", "NUM_SHARD": "2", "MAX_TOTAL_TOKENS": "4096"}
    settings = started([], environ)
    assert not settings.errors
    assert settings.model.model_id == "acme/assistant"
    assert settings.model.max_model_len == 4096
    assert settings.model.tgi_compat


@pytest.mark.parametrize(
    "environ",
    [
        {"SM_VLLM_NO_SUCH_ARGUMENT": "1"},
        {"SM_SGLANG_TP_SIZE": "2"},
        {"VLLM_LORA_RESOLVER_CACHE_DIR": "/adapters"},
        {"NUM_SHARD": "2"},
        {"MODEL_ID": "acme/model"},
        {"QUANTIZE": "awq", "MODEL_ID": "acme/model", "HF_MODEL_ID": "acme/other"},
    ],
)
def test_variables_that_are_not_read_are_named(
    started: Started, environ: Mapping[str, str]
) -> None:
    """One warning each, an error with --strict."""
    name = next(iter(environ))
    assert any(name in warning for warning in started([], environ).warnings)
    assert any(name in error for error in started(["--strict"], environ).errors)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-modle-len", "64"], "closest names: --max-model-len"),
        (["--headless"], "--headless is not possible here"),
        (["--config", __file__, "--config", "/b"], "--config /b: a second file is not read"),
        ([MODEL, "--model", "/other"], "names another model"),
        (["--max-model-len", "many"], "--max-model-len many"),
        (["--lora-modules", "nothing"], "lora_modules"),
        (["--no-enable-lora", "--lora-modules", "a=/x"], "needs enable_lora=true"),
        (["--tool-server", "demo"], "--tool-server demo is not possible here"),
        (["--api-key", ""], "a value is needed"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs 2 is not possible here: client certificates"),
        (["--ssl-ciphers", "TLSv1"], "--ssl-ciphers TLSv1 is not possible here"),
        (["--uds", "/s", "--ssl-keyfile", "/k"], "inference_address=unix:/s (--uds) is a Unix"),
    ],
)
def test_flags_that_cannot_be_used_are_errors(
    started: Started, words: list[str], said: str
) -> None:
    """Nothing is passed over, and each is named as it was written."""
    assert any(said in error for error in started(words).errors), started(words).errors


@pytest.mark.parametrize(
    ("words", "environ", "origin"),
    [
        ([], {"SM_VLLM_HOST": "1.2.3.4", "SM_VLLM_PORT": "9"}, "SM_VLLM_HOST, SM_VLLM_PORT"),
        (["--port", "9"], {"SERVING_INFERENCE_ADDRESS": "http://1.2.3.4"},
         "--port, SERVING_INFERENCE_ADDRESS"),
        (["--host", "1.2.3.4", "--port", "9"], {"SERVING_INFERENCE_ADDRESS": "http://1.1.1.1:1"},
         "--host, --port"),
        (["--port", "9", "--ssl-certfile", "/c"], {"SERVING_INFERENCE_ADDRESS": "http://1.2.3.4"},
         "--ssl-certfile, --port, SERVING_INFERENCE_ADDRESS"),
        (["--port", "9", "--ssl-keyfile", "/k"], {"SERVING_INFERENCE_ADDRESS": "http://1.2.3.4"},
         "--ssl-keyfile, --port, SERVING_INFERENCE_ADDRESS"),
        (["--host", "1.2.3.4"], {"SAGEMAKER_BIND_TO_PORT": "9", "SERVING_INFERENCE_ADDRESS": ""},
         "--host, SAGEMAKER_BIND_TO_PORT"),
    ],
)  # fmt: skip
def test_address_of_several_places_names_each(
    started: Started, words: list[str], environ: Mapping[str, str], origin: str
) -> None:
    """And none that another one replaces."""
    server = started(words, environ).server
    assert server.inference_address.endswith("://1.2.3.4:9")
    assert server.details.inference_address.origin.name == origin


def test_folder_of_vllm_s_resolver_is_a_store(started: Started) -> None:
    """Where vLLM would load adapters from it: llm-d's manifest; else it is named."""
    environ = {
        "VLLM_LORA_RESOLVER_CACHE_DIR": "/adapters",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_PLUGINS": "lora_filesystem_resolver",
    }
    settings = started([MODEL, "--enable-lora", "--strict"], environ)
    store = settings.feature(AdapterStoreSettings)
    assert store.adapter_store == "/adapters"
    assert store.details.adapter_store.origin.name == "VLLM_LORA_RESOLVER_CACHE_DIR"
    assert not settings.errors
    for change in ({"VLLM_PLUGINS": "others"}, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}):
        settings = started([MODEL, "--enable-lora"], {**environ, **change})
        assert settings.feature(AdapterStoreSettings).adapter_store is None
        assert any("VLLM_LORA_RESOLVER_CACHE_DIR" in warning for warning in settings.warnings)


@pytest.mark.parametrize("written", ["--port=9000", "--enable-ssl-refresh", "--max_model_len=64"])
def test_arguments_of_a_chart_that_are_written_out_are_no_error(
    started: Started, written: str
) -> None:
    """Flags of ours, those without an effect, and other spellings are on the line as well."""
    environ = {"VLLM_ADDITIONAL_ARGS": written}
    assert not started([MODEL, "--strict", written], environ).errors
    (error,) = started([MODEL, "--strict", "--enforce-eager"], environ).errors
    assert error.startswith("VLLM_ADDITIONAL_ARGS has no effect by itself")


def test_api_key_of_a_flag_is_never_printed(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the server's key, with the flag as its origin."""
    settings = started(["--api-key", "s3cret-key"])
    assert settings.server.lmi_api_key == "s3cret-key"
    assert "s3cret" not in settings.server.details.lmi_api_key.stated
    assert "s3cret" not in " ".join((*settings.warnings, *settings.errors))


def test_socket_of_a_flag_comes_before_a_port(started: Started) -> None:
    """As in vLLM: a private socket never becomes an open port."""
    settings = started([MODEL, "--port", "8000", "--host", "0.0.0.0", "--uds", "/run/a.sock"])
    assert settings.server.inference_address == "unix:/run/a.sock"


def test_adapters_of_tgi_are_registered(started: Started) -> None:
    """NAME=SOURCE as here; an id alone is the name, too; one with a revision is a warning."""
    environ = {"MODEL_ID": "acme/base", "NUM_SHARD": "1", "LORA_ADAPTERS": "a=/x,b=/y"}
    assert started([], environ).model.lora_modules == {"a": "/x", "b": "/y"}
    settings = started([], {**environ, "LORA_ADAPTERS": "acme/one, two=/x"})
    assert settings.model.lora_modules == {"acme/one": "acme/one", "two": "/x"}
    assert settings.model.enable_lora
    settings = started([], {**environ, "LORA_ADAPTERS": "acme/adapter@v2"})
    assert settings.model.lora_modules is None
    assert any("LORA_ADAPTERS" in warning for warning in settings.warnings)


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        ([], {"sm_vllm_max_model_len": "4"}, "sm_vllm_max_model_len has no effect"),
        ([], {"Sm_Vllm_X": "3"}, "write SM_VLLM_X"),
        (["--demo", "acme/x"], {}, "--demo names no model here: MODEL acme/x does"),
        (["--demo", "--model", "acme/x"], {}, "--demo names no model here: --model acme/x does"),
        (["--demo"], {"LMI_SHUTDOWN_DELAY": "60"}, "LMI_SHUTDOWN_DELAY=60 leaves no time to drain"),
    ],
)
def test_what_has_no_effect_is_a_warning(
    started: Started, words: list[str], environ: dict[str, str], said: str
) -> None:
    """Names in the wrong case, a second model, and a pause that leaves no time to drain."""
    settings = started(["serve", *words] if words else [], environ)
    assert any(said in warning for warning in settings.warnings), settings.warnings
