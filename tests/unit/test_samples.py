"""Every file in config/samples is taken by `explain --strict`, and does what its case is about."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.commands import explain
from tests.support.assembled import CONFIGURATION
from tests.support.certificates import make_pair

FOLDER = Path(__file__).parent.parent.parent / "config" / "samples"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".properties", ".env"))
# File -> what vLLM is told: an argument of each case, and its value.
EXPECTED = {
    "hub-model.properties": {"max_num_seqs": 128, "max_model_len": 16384},
    "single-gpu.env": {"max_model_len": 16384, "tensor_parallel_size": 8},
    "multi-gpu.env": {"tensor_parallel_size": 8},
    "multi-node.env": {"pipeline_parallel_size": 2, "nnodes": 2, "master_addr": "10.0.0.10"},
    "local-weights.properties": {"enable_prefix_caching": True, "tensor_parallel_size": 8},
    "two-copies.properties": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "lora-adapters.properties": {"enable_lora": True, "max_loras": 8},
    "adapter-store.properties": {"enable_lora": True, "max_lora_rank": 32},
    "https.env": {"model": "acme/assistant-8b"},
    "lora.env": {"enable_lora": True, "max_cpu_loras": 64},
    "quantized.properties": {"quantization": "awq", "dtype": "float16"},
    "quantized.env": {"quantization": "fp8"},
    "speculative.properties": {"tensor_parallel_size": 4},
    "speculative.env": {},
    "long-context.properties": {"max_model_len": 131072, "max_num_batched_tokens": 8192},
    "long-context.env": {"kv_cache_dtype": "fp8", "max_num_seqs": 16},
    "embeddings.properties": {"max_model_len": 512},
    "embeddings.env": {"max_model_len": 512},
    "chat-with-tools.properties": {"model": "acme/assistant-8b"},
    "from-lmi-dist.properties": {"max_num_batched_tokens": 32768},
}
MACHINE = "/etc/lmi/"  # where a sample has its files
WITH_WARNINGS = {"from-lmi-dist.properties"}  # options that LMI-Dist alone had


def test_every_sample_has_its_case() -> None:
    """A new file comes with what it is to mean."""
    assert {path.name for path in FILES} == EXPECTED.keys()


def explained(path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `explain --strict` says of a sample, on a machine with eight GPUs."""
    environ = {}
    if path.suffix == ".properties":
        (store / "serving.properties").write_text(path.read_text())
        (store / "config.json").write_text("{}")
    else:
        lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
        environ = dict(line.split("=", 1) for line in lines)
        environ = {name: _here(text, store) for name, text in environ.items()}
    words = ["--format", "json", "--gpus", "8", "--model-store", str(store)]
    words += [] if path.name in WITH_WARNINGS else ["--strict"]
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser, CONFIGURATION)
    code = explain.run(parser.parse_args(words), environ, CONFIGURATION)
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, ""), printed
    return dict(json.loads(printed.out))


def _here(text: str, folder: Path) -> str:
    """Return a value with files below `folder` in place of those of the machine to be."""
    if not text.startswith(MACHINE):
        return text
    pair = make_pair(folder, "cert")
    keys = folder / "keys.txt"
    keys.write_text("sesame\n")
    found = {"cert.pem": pair.certificate, "key.pem": pair.key, "keys.txt": keys}
    return str(found[text.removeprefix(MACHINE)])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_sample_is_taken_and_means_its_case(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No error, no unknown name, and the engine is told what the case is about."""
    found = explained(path, tmp_path, capsys)
    told = found["engine_args"]
    assert {name: told.get(name) for name in EXPECTED[path.name]} == EXPECTED[path.name]
