"""config.json of a model that is not here: read before a byte of the weights, by every verb."""

import json
import socket
import time
from pathlib import Path

import pytest

from lmi_vllm.errors import ConfigurationError
from tests.support.remote_models import PICKLES, explained, on_a_hub, planned

QUANTIZED = {"architectures": ["LlamaForCausalLM"], "quantization_config": {}}


@pytest.mark.parametrize("method", ["bitsandbytes", "squeezellm"])
def test_unsupported_quantization_on_the_hub_is_refused(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the alternative, by `explain` and by the plan of a start."""
    with on_a_hub(QUANTIZED | {"quantization_config": {"quant_method": method}}) as (environ, _):
        (error,) = explained(environ, capsys)["errors"]
        with pytest.raises(ConfigurationError, match=method):
            planned(environ)
    assert "option.quantize=fp8" in error


def test_hub_that_is_away_costs_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` says what it could not check; with --offline nothing is asked and nothing said."""
    environ = {"HF_MODEL_ID": "acme/tiny", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/none"}
    document = explained(environ, capsys)
    assert document["errors"] == []
    (warning,) = document["warnings"]
    assert warning.startswith("the settings were not checked against the model: config.json cannot")
    assert explained(environ, capsys, "--offline")["warnings"] == []


def test_hub_that_never_answers_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is taken and stays silent: bounded, and named."""
    monkeypatch.setattr("lmi_vllm.checks.model_config.READ_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began = time.monotonic()
        environ = {"HF_MODEL_ID": "acme/tiny", "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
        (warning,) = explained(environ, capsys)["warnings"]
    assert time.monotonic() - began < 5
    assert "did not come within 0.5 s" in warning


def test_cached_config_counts_where_the_hub_is_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """HF_HUB_OFFLINE: the snapshot in the hub's cache is read."""
    folder = tmp_path / "hub" / "models--acme--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    config = QUANTIZED | {"quantization_config": {"quant_method": "squeezellm"}}
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))
    environ = {"HF_MODEL_ID": "acme/tiny", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    (error,) = explained(environ, capsys)["errors"]
    assert "squeezellm" in error
    away = environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert explained(away, capsys)["errors"] == [error]


MIXTURE = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}


def test_lora_of_experts_on_a_cpu_is_refused_before_the_fetch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `explain` and by the plan of a start; not for GPUs, and not for another build."""
    monkeypatch.setattr("lmi_vllm.checks.model.is_cpu_build", lambda: True)
    with on_a_hub(MIXTURE) as (environ, asked):
        lora = environ | {"OPTION_ENABLE_LORA": "true", "CUDA_VISIBLE_DEVICES": ""}
        (error,) = explained(lora, capsys, "--gpus", "0")["errors"]
        assert "enable_lora: the model is a mixture of experts" in error
        with pytest.raises(ConfigurationError, match="mixture of experts"):
            planned(lora)
        assert explained(lora, capsys)["errors"] == []
        assert explained(environ, capsys, "--gpus", "0")["errors"] == []
        monkeypatch.setattr("lmi_vllm.checks.model.is_cpu_build", lambda: False)
        assert explained(lora, capsys, "--gpus", "0")["errors"] == []
    assert not set(asked) & set(PICKLES)
