"""What is found out about an adapter before the engine sees it."""

import json
import struct
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.adapters.check import check_adapter
from lmi_vllm.checks.base_model import BaseModel, describe_base
from lmi_vllm.checks.safetensors_header import DamagedFileError, read_tensors
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.adapter_files import copy_adapter as copy_for_engine
from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.features.pickled_adapters import convert_pickle
from tests.support.adapter_files import (
    CAPITALS,
    CONFIG,
    WEIGHTS,
    copy_adapter,
    write_config,
    write_safetensors,
)

Change = Callable[[Path], object]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base() -> BaseModel:
    """The embedded model as its files tell."""
    return describe_base(DEMO_MODEL_DIR, ("demo",), 16)


def weights(folder: Path, rank_a: int, columns: int, rows: int, rank_b: int, name: str) -> None:
    """Write one pair of matrices."""
    shapes = {f"{name}.lora_A.weight": (rank_a, columns), f"{name}.lora_B.weight": (rows, rank_b)}
    write_safetensors(folder / WEIGHTS, shapes)


@pytest.mark.parametrize("name", ["capitals", "json"])
def test_embedded_adapter_is_sound(base: BaseModel, name: str) -> None:
    """Nothing speaks against the adapters that come with the model."""
    check_adapter(CAPITALS.parent / name, name, base)


def test_base_model_without_files_is_not_compared(tmp_path: Path) -> None:
    """Where the base's weights are not known, their shapes are left to the engine."""
    base = describe_base(tmp_path / "gone", (), 16)
    adapter = copy_adapter(tmp_path / "adapter")
    weights(adapter, 16, 7, 7, 16, "base_model.model.some.layer")
    check_adapter(adapter, "adapter", base)


@pytest.mark.parametrize(
    ("config", "stated"), [({"r": 8}, 8), ({"rank_pattern": {"v_proj": 4}}, 4)], ids=str
)
def test_rank_that_is_not_that_of_the_weights_is_refused(
    base: BaseModel, tmp_path: Path, config: dict[str, Any], stated: int
) -> None:
    """The engine would scale the product by it: the answers would be wrong, with 200."""
    adapter = copy_adapter(tmp_path / "adapter", **config)
    said = f"_proj has rank 16 in its weights and {stated} in adapter_config.json"
    with pytest.raises(AdapterRefusedError, match=said):
        check_adapter(adapter, "adapter", base)
    with pytest.raises(AdapterRefusedError, match=said):
        copy_for_engine(adapter, tmp_path / "copy", base, 1 << 24, convert_pickle)


HEAD = "base_model.model.score"
TOKENS = "base_model.model.model.embed_tokens.trainable_tokens_delta"
WHOLE: dict[str, tuple[dict[str, tuple[int, int]], str]] = {
    "head": ({"base_model.model.lm_head.weight": (8, 128)}, "a whole weight, of modules_to_save"),
    "vocabulary": (
        {"base_model.model.model.embed_tokens.weight": (520, 128)}, "a vocabulary that was resized"
    ),
    "tokens": ({TOKENS: (3, 128)}, "trainable_token_indices"),
    "KaSA": ({f"{LAYER}.lora_diag": (16, 1)}, r"a part of KaSA \(kasa_config\)"),
    "VeLoRA": ({f"{LAYER}.lora_velora_embed": (4, 1)}, r"a part of VeLoRA \(velora_config\)"),
    "MonteCLoRA": (
        {f"{LAYER}.lora_monteclora_sampler.std_prior": (1, 1)},
        r"a part of MonteCLoRA \(monteclora_config\)",
    ),
    "DoRA": ({f"{LAYER}.lora_magnitude_vector": (128, 1)}, r"a part of DoRA \(use_dora\)"),
    "empty": ({f"{LAYER}.lora_A.weight": (0, 0), f"{LAYER}.lora_B.weight": (0, 0)}, "ZeRO-3"),
    "of a classifier": ({f"{HEAD}.weight": (2, 128), f"{HEAD}.bias": (2, 1)}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_factor_is_refused_by_its_cause(
    base: BaseModel, tmp_path: Path, name: str
) -> None:
    """The engine's own refusal names a weight, and not what the adapter was trained with."""
    shapes, text = WHOLE[name]
    adapter = copy_adapter(tmp_path / "adapter")
    layer = {f"{LAYER}.lora_A.weight": (16, 128), f"{LAYER}.lora_B.weight": (128, 16)}
    write_safetensors(adapter / WEIGHTS, {**layer, **shapes})
    refused = pytest.raises(AdapterRefusedError, match=text) if text else nullcontext()
    with refused:
        check_adapter(adapter, "adapter", base)
    with refused:
        copy_for_engine(adapter, tmp_path / "copy", base, 1 << 24, convert_pickle)


def embedding(folder: Path, change: Callable[[Any], Any], name: str = "model.embed_tokens") -> Path:
    """Write an adapter with the base's embedding, as PEFT saves it beside one of the embedding."""
    numpy = pytest.importorskip("safetensors.numpy")
    table = numpy.load_file(DEMO_MODEL_DIR / "model.safetensors")["model.embed_tokens.weight"]
    tensors = numpy.load_file(copy_adapter(folder) / WEIGHTS)
    tensors[f"base_model.model.{name}.base_layer.weight"] = change(table)
    numpy.save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda table: table, ""),
        (lambda table: table.astype("f2"), ""),
        (lambda table: -table, "is not that of the model served"),
        (lambda table: table * 1.02, "is not that of the model served"),
        (lambda table: table[:-1].copy(), "or to one whose vocabulary was resized"),
    ],
)
def test_weight_of_the_base_in_an_adapter_is_compared(
    base: BaseModel, tmp_path: Path, change: Callable[[Any], Any], text: str
) -> None:
    """VLLM reads none of them, so an adapter of another base would answer, with 200."""
    adapter = embedding(tmp_path / "adapter", change)
    refused = pytest.raises(AdapterRefusedError, match=text) if text else nullcontext()
    with refused:
        check_adapter(adapter, "adapter", base)
    with refused:
        copy_for_engine(adapter, tmp_path / "copy", base, 1 << 24, convert_pickle)


@pytest.mark.parametrize("change", [lambda table: table, lambda table: -table])
@pytest.mark.parametrize("kind", ["tied head", "quantized layers"])
def test_base_weight_is_compared_where_the_files_have_it(
    base: BaseModel, tmp_path: Path, kind: str, change: Callable[[Any], Any]
) -> None:
    """A head that shares the embedding's weight; the embedding of a model with quantized layers."""
    name = "lm_head" if kind == "tied head" else "model.embed_tokens"
    adapter = embedding(tmp_path / "adapter", change, name)
    table = base.stored["model.embed_tokens"]
    served = replace(base, stored={"model.embed_tokens": table})
    if kind == "quantized layers":
        served = replace(served, shapes={}, weights={})
    is_other = change(1) == -1
    refused = pytest.raises(AdapterRefusedError, match="not that of") if is_other else nullcontext()
    with refused:
        check_adapter(adapter, "adapter", served)


def test_base_weight_that_cannot_be_compared_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model's weights are streamed from a store, and are not on this machine."""
    check_adapter(embedding(tmp_path / "adapter", lambda table: table), "fr", BaseModel())
    assert "fr holds the base's weight of model.embed_tokens" in caplog.text


def write_long_header(path: Path) -> None:
    """Write a file that is sound but for a header whose reading would hold up every thread."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "name": "x" * 1000}
    header = json.dumps({f"{number}": entry for number in range(8000)}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda at: (at / CONFIG).unlink(), "has no adapter_config.json"),
        (lambda at: (at / CONFIG).write_text("{"), "is not JSON"),
        (lambda at: (at / CONFIG).write_text("[]"), "is not a JSON object"),
        (lambda at: (at / CONFIG).write_bytes(b"\xff\xfe"), "is not JSON"),
        (lambda at: write_config(at, notes="x" * (2 << 20)), "larger than 2 MiB"),
        (lambda at: write_long_header(at / WEIGHTS), "at most 8388608 are read"),
        (lambda at: write_config(at, peft_type="IA3"), "only LORA can be served"),
        (lambda at: write_config(at, use_dora=True), "does not support use_dora"),
        (lambda at: write_config(at, bias="all"), "does not support adapters with bias"),
        (lambda at: write_config(at, r=17), "rank 17 is greater than max_lora_rank 16"),
        (lambda at: write_config(at, r=0), "whole number above 0"),
        (lambda at: write_config(at, r="16"), "whole number above 0"),
        (lambda at: write_config(at, r=8.0), "whole number above 0, it is 8.0"),
        (lambda at: write_config(at, rank_pattern={"q_proj": 64}), "rank 64 is greater"),
        (lambda at: (at / WEIGHTS).unlink(), "weights are missing"),
        (lambda at: (at / WEIGHTS).write_bytes(b""), "too short"),
        (lambda at: (at / WEIGHTS).write_bytes(b"\xff" * 64), "its header says"),
        (lambda at: write_safetensors(at / WEIGHTS, {}), "holds no weights"),
        (lambda at: weights(at, 4, 128, 128, 8, LAYER), "has rank 4 in lora_A and 8 in lora_B"),
        (lambda at: weights(at, 32, 128, 128, 32, LAYER), "rank 32 is greater"),
        (lambda at: weights(at, 8, 64, 64, 8, LAYER), "belongs to another base model"),
        (lambda at: weights(at, 8, 8, 8, 8, LAYER.replace("q_proj", "mixer")), "has no"),
    ],
)
def test_fault_is_refused_by_name(
    base: BaseModel, tmp_path: Path, change: Change, text: str
) -> None:
    """Each fault is one refusal that says which source and what about it."""
    adapter = copy_adapter(tmp_path / "adapter")
    change(adapter)
    with pytest.raises(AdapterRefusedError, match=text) as caught:
        check_adapter(adapter, "my-source", base)
    assert "my-source" in caught.value.text


def test_half_a_pair_is_refused(base: BaseModel, tmp_path: Path) -> None:
    """A lora_A without its lora_B would be loaded as something else."""
    adapter = copy_adapter(tmp_path / "adapter")
    write_safetensors(adapter / WEIGHTS, {f"{LAYER}.lora_A.weight": (8, 128)})
    with pytest.raises(AdapterRefusedError, match="lora_A only"):
        check_adapter(adapter, "adapter", base)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}, "bytes, its shape"),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]}, "outside of the file"),
        ({"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}, "no whole number up to"),
        ({"dtype": "F32", "shape": [1e999, 1], "data_offsets": [0, 16]}, "no whole number up to"),
        ({"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]}, "no whole number up to"),
        ({"dtype": "F32", "shape": [1 << 63, 0], "data_offsets": [0, 0]}, "no whole number up to"),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 1e999]}, "no whole number up to"),
        ({"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}, "more than 8 sides"),
        ({"dtype": "F99", "shape": [2, 2], "data_offsets": [0, 16]}, "cannot be read"),
        ({"dtype": "F32", "shape": [2, 2]}, "cannot be read"),
        ({"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}, "end at byte 8 of 16"),
    ],
)
def test_header_that_does_not_fit_its_file_is_damage(
    tmp_path: Path, entry: object, text: str
) -> None:
    """Offsets, shapes and the file's size have to agree."""
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(DamagedFileError, match=text):
        read_tensors(path)


def test_header_of_many_large_sides_takes_no_time(tmp_path: Path) -> None:
    """99864 sides of 20 digits took 21 s, in which no other request was served."""
    entry = {"dtype": "F32", "shape": [10**19] * 99_864, "data_offsets": [0, 16]}
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    began = time.process_time()
    with pytest.raises(DamagedFileError, match="more than 8 sides") as caught:
        read_tensors(path)
    assert time.process_time() - began < 2
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["x" * 1001, ".".join("a" * 600)])
def test_long_names_of_tensors_are_refused(tmp_path: Path, name: str) -> None:
    """They are compared part by part, and printed."""
    write_safetensors(tmp_path / "x.safetensors", {name: (2, 2)})
    with pytest.raises(DamagedFileError, match="a name in it has more than 1000") as caught:
        read_tensors(tmp_path / "x.safetensors")
    assert len(str(caught.value)) < 200


def test_only_files_that_the_engine_reads_are_copied(tmp_path: Path) -> None:
    """A folder may hold any number of other files, of any size."""
    adapter = copy_adapter(tmp_path / "adapter")
    for number in range(3):
        (adapter / f"checkpoint-{number}.pt").write_bytes(b"x")
    with (adapter / "optimizer.bin").open("wb") as file:
        file.truncate(1 << 40)
    copy_for_engine(adapter, tmp_path / "copy", BaseModel(), 1 << 20, convert_pickle)
    assert {file.name for file in (tmp_path / "copy").iterdir()} == {CONFIG, WEIGHTS}


@pytest.mark.parametrize("field", ["r", "peft_type", "lora_alpha", "base_model_name_or_path"])
def test_long_values_of_a_configuration_are_not_repeated(
    base: BaseModel, tmp_path: Path, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have 2 MiB, and the answer went into the log, too."""
    caplog.set_level("INFO")
    adapter = copy_adapter(tmp_path / "adapter")
    config = json.loads((adapter / CONFIG).read_text()) | {field: "x" * 100_000}
    (adapter / CONFIG).write_text(json.dumps(config))
    text = ""
    try:
        check_adapter(adapter, "adapter", base)
    except AdapterRefusedError as error:
        text = error.text
    assert len(text + caplog.text) < 1000
