"""config.json of a model that is not here: read before a byte of the weights, by every verb."""

import argparse
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.commands import explain
from lmi_vllm.config.settings import load_settings
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.server.plan import StartPlan, plan_start
from tests.support.hub_server import Repository, hub_server
from tests.support.s3_server import BUCKET, s3_server

QUANTIZED = {"architectures": ["LlamaForCausalLM"], "quantization_config": {}}
PICKLES = ("pytorch_model.bin", "tokenizer.json")

Place = Callable[[Mapping[str, object]], AbstractContextManager[tuple[dict[str, str], list[str]]]]


@contextmanager
def on_a_hub(config: Mapping[str, object]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Give the variables of a model on a hub, and the paths it is asked for."""
    files = dict.fromkeys(PICKLES, b"weights") | {"config.json": json.dumps(config).encode()}
    with hub_server(acme__tiny=Repository(files)) as hub:
        asked: list[str] = []
        yield {"HF_MODEL_ID": "acme/tiny", "HF_ENDPOINT": hub.url}, asked
        asked += [path.rpartition("/")[2] for path in hub.paths("GET")]


@contextmanager
def in_s3(config: Mapping[str, object]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Give the same of a prefix in S3."""
    with s3_server() as store:
        files = dict.fromkeys(PICKLES, b"weights") | {"config.json": json.dumps(config).encode()}
        store.put({f"tiny/{name}": body for name, body in files.items()})
        asked: list[str] = []
        yield {**store.environ, "HF_MODEL_ID": f"s3://{BUCKET}/tiny/"}, asked
        asked += [name.rpartition("/")[2] for name in store.objects_sent]


def planned(environ: Mapping[str, str]) -> StartPlan:
    """Return what `serve` would start; refused before anything is fetched."""
    plan = plan_start(load_settings(environ), environ)
    assert plan is not None
    return plan


def explained(
    environ: Mapping[str, str], capsys: pytest.CaptureFixture[str], *flags: str
) -> Mapping[str, Any]:
    """Return what `explain` prints, on four GPUs."""
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    given = ["--format", "json", "--gpus", "4", "--model-store", "/nonexistent", *flags]
    explain.run(parser.parse_args(given), environ)
    document: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize("place", [on_a_hub, in_s3])
def test_degree_that_t5_cannot_have_is_refused_before_the_fetch(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `explain` and by the plan of a start; nothing but small files is asked for."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with place({"architectures": ["T5ForConditionalGeneration"]}) as (environ, asked):
        environ |= {"TENSOR_PARALLEL_DEGREE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        (error,) = explained(environ, capsys)["errors"]
        assert "tensor_parallel_size=2" in error
        assert "runs on one device" in error
        with pytest.raises(ConfigurationError, match="runs on one device"):
            planned(environ)
    assert asked.count("config.json") == 2
    assert set(asked) == {"config.json"}


def test_all_devices_and_pickled_weights_are_accepted_of_a_hub_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the guides recommend for T5: `max` is one device, and .bin files are read."""
    with on_a_hub({"architectures": ["T5ForConditionalGeneration"]}) as (environ, _):
        environ |= {"TENSOR_PARALLEL_DEGREE": "max", "OPTION_LOAD_FORMAT": "pt"}
        document = explained(environ, capsys)
        plan = planned(environ)
    assert document["errors"] == []
    assert document["engine_args"]["tensor_parallel_size"] == 1
    assert any("means one device" in warning for warning in document["warnings"])
    assert plan.arguments.values["load_format"] == "pt"


@pytest.mark.parametrize("method", ["bitsandbytes", "squeezellm"])
def test_checkpoint_of_a_hub_that_vllm_no_longer_reads_is_refused(
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
