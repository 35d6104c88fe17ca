"""The key of compiled code: equal where it may run again, another one wherever it may not."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_vllm.features.compile_cache.key import cache_key, device_identity, key_parts
from lmi_vllm.messages import EngineArguments, ModelArtifacts

HUB = ModelArtifacts("m", "org/model", "org/model", "main")
ARGUMENTS = {
    "model": "org/model",
    "dtype": "float32",
    "max_model_len": 2048,
    "enforce_eager": False,
}


def key(served: ModelArtifacts = HUB, /, **changed: object) -> str:
    """The key of a start with these arguments changed."""
    return cache_key(key_parts(served, EngineArguments({**ARGUMENTS, **changed}), {}))


def folder_with(folder: Path, config: str = "{}", weights: int = 10) -> ModelArtifacts:
    """A model folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(bytes(weights))
    return ModelArtifacts("m", str(folder), str(folder))


def test_key_is_a_file_name_and_the_same_each_time() -> None:
    """Replicas agree on it."""
    assert key() == key()
    assert key().isalnum()


OTHERS = {
    "dtype": {"dtype": "bfloat16"},
    "length": {"max_model_len": 4096},
    "new argument": {"compilation_config": {"mode": 3}},
    "parallel": {"tensor_parallel_size": 2},
    "rank": {"node_rank": 1},
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_key_changes_with_the_compiled_code(changed: dict[str, object]) -> None:
    """Any engine argument but the few that say who is asked and told."""
    assert key(**changed) != key()


def test_key_ignores_names_and_secrets() -> None:
    """A token that was renewed, or another served name, costs no compilation."""
    assert key(served_model_name=["x"], hf_token="t", model="/a/path") == key()


def test_key_changes_with_model_and_revision() -> None:
    """Another hub id or revision is another model."""
    assert key(replace(HUB, reference="org/other", model="org/other")) != key()
    assert key(replace(HUB, revision="v2")) != key()


def test_key_of_a_folder_is_its_content(tmp_path: Path) -> None:
    """Every model is at /opt/ml/model: configuration and sizes identify it, the path does not."""
    first = key(folder_with(tmp_path / "a"))
    assert key(folder_with(tmp_path / "b")) == first
    assert key(folder_with(tmp_path / "c", config='{"layers": 2}')) != first
    assert key(folder_with(tmp_path / "d", weights=11)) != first


def test_key_has_no_secret_in_its_parts() -> None:
    """The parts are stored beside the code, so that people can see why two keys differ."""
    model = replace(HUB, reference="s3://u:s3cret@b/p", model="s3://u:s3cret@b/p")
    assert "s3cret" not in str(key_parts(model, EngineArguments({"hf_token": "s3cret"}), {}))
    assert "s3cret" not in str(key_parts(HUB, EngineArguments({"config": {"k": "s3cret"}}), {}))


CPU = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 79\nflags\t\t: fpu avx2 {more}\n\n"
INFORMATION = "Model: \t\t NVIDIA A10G\nIRQ:   \t\t 0\nGPU UUID: \t GPU-1\n"


def machine(folder: Path, flags: str = "", gpus: int = 0) -> Path:
    """What Linux says of a machine."""
    folder.mkdir()
    (folder / "cpuinfo").write_text(CPU.format(more=flags) * 2)
    for number in range(gpus):
        place = folder / "driver" / "nvidia" / "gpus" / str(number)
        place.mkdir(parents=True)
        (place / "information").write_text(INFORMATION)
    return folder


def test_device_with_more_processor_flags_is_another(tmp_path: Path) -> None:
    """Code for AVX-512 must not land where there is none; the order of flags says nothing."""
    plain = device_identity({}, machine(tmp_path / "a", "sse fma"))
    assert device_identity({}, machine(tmp_path / "b", "fma sse")) == plain
    assert device_identity({}, machine(tmp_path / "c", "fma sse avx512f")) != plain


def test_device_counts_threads_on_a_cpu(tmp_path: Path) -> None:
    """Inductor writes their number into the code."""
    proc = machine(tmp_path / "a")
    assert device_identity({}, proc)["threads"] == len(os.sched_getaffinity(0))
    assert device_identity({"OMP_NUM_THREADS": "7"}, proc)["threads"] == "7"


def test_device_is_identified_without_proc(tmp_path: Path) -> None:
    """Elsewhere than on Linux the machine's architecture is what there is."""
    assert device_identity({}, tmp_path / "none")["machine"]


def test_device_names_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's names count, each once; threads do not."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 0\necho 1\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    identity = device_identity({}, machine(tmp_path / "proc", gpus=2))
    assert identity["gpus"] == ["NVIDIA A10G"]
    assert identity["gpu_count"] == 2
    assert "threads" not in identity
