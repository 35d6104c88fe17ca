"""Weights of adapters: every number is looked at, and products are compared with the base."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

np = pytest.importorskip("numpy", reason="comes with vLLM: nothing computes with weights without")

from lmi_vllm.adapters.check import check_adapter  # noqa: E402
from lmi_vllm.checks import adapter_weights  # noqa: E402
from lmi_vllm.checks.adapter_config import LoraScales  # noqa: E402
from lmi_vllm.checks.adapter_weights import any_base, check_values, limit_for_weight  # noqa: E402
from lmi_vllm.checks.base_model import BaseModel, describe_base  # noqa: E402
from lmi_vllm.checks.safetensors_header import read_tensors  # noqa: E402
from lmi_vllm.demo import DEMO_MODEL_DIR  # noqa: E402
from lmi_vllm.errors import AdapterRefusedError  # noqa: E402
from tests.support.adapter_files import WEIGHTS, copy_adapter, make_adapter  # noqa: E402

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
ONE = LoraScales(rank=1, alpha=1.0, is_rank_stabilised=False, ranks={}, alphas={})
Raw = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def write(path: Path, tensors: Raw) -> Path:
    """Write tensors of any dtype by their bytes."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def floats(values: "np.ndarray") -> tuple[str, tuple[int, ...], bytes]:  # type: ignore[name-defined]
    """Return a tensor of 32 bits."""
    return "F32", values.shape, values.astype("<f4").tobytes()


def check(path: Path, scales: LoraScales = ONE) -> None:
    """Check a file where nothing is known of the base."""
    check_values(path, read_tensors(path), scales, "my-source", any_base)


ONES = {
    "F64": np.ones(1, "<f8").tobytes(),
    "F32": np.ones(1, "<f4").tobytes(),
    "F16": np.ones(1, "<f2").tobytes(),
    "BF16": b"\x80\x3f",
    "F8_E5M2": b"\x3c",
    "F8_E4M3": b"\x38",
    "F8_E8M0": b"\x7f",
    "I8": b"\x01",
    "U8": b"\x01",
    "I32": b"\x01\0\0\0",
    "BOOL": b"\x01",
}
NANS = {
    "F64": np.full(1, np.nan, "<f8").tobytes(),
    "F32": np.full(1, np.inf, "<f4").tobytes(),
    "F16": np.full(1, -np.inf, "<f2").tobytes(),
    "BF16": b"\xc0\x7f",
    "F8_E5M2": b"\x7c",
    "F8_E4M3": b"\xff",
    "F8_E8M0": b"\xff",
}


@pytest.mark.parametrize("dtype", ONES)
def test_each_dtype_is_read_as_its_numbers(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of ones is as large as its rank, whatever it is stored as."""
    shapes = {A: (4, 6), B: (8, 4)}
    path = write(
        tmp_path / "w",
        {name: (dtype, shape, ONES[dtype] * math.prod(shape)) for name, shape in shapes.items()},
    )
    with pytest.raises(AdapterRefusedError, match="mean size of 4; more than 1 would"):
        check(path)
    check(path, LoraScales(rank=4, alpha=1.0, is_rank_stabilised=False, ranks={}, alphas={}))


@pytest.mark.parametrize("dtype", NANS)
@pytest.mark.parametrize(
    ("name", "at"), [(A, 0), (f"{LAYER}.other", 11), ("base_model.model.score.weight", 5)]
)
def test_one_number_that_is_not_finite_is_found(
    dtype: str, name: str, at: int, tmp_path: Path
) -> None:
    """Anywhere, in any tensor of the file, in any dtype."""
    size = len(ONES[dtype])
    content = bytearray(12 * size)
    content[at * size : (at + 1) * size] = NANS[dtype]
    path = write(tmp_path / "w", {name: (dtype, (2, 6), bytes(content))})
    with pytest.raises(AdapterRefusedError, match=r"my-source: .* weights that are not finite"):
        check(path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("model.layers.0.q_proj.lora_B.weight", "base_model.model.model.layers.0.q_proj.lora_B"),
        ("base_model.model.m.lora_B.weight", "base_model.model.base_model.model.m.lora_B.weight"),
        ("embed_tokens.lora_A.weight", "embed_tokens.lora_embedding_A"),
    ],
)
def test_weights_that_come_twice_are_refused(first: str, second: str, tmp_path: Path) -> None:
    """The engine takes one of them: under another name for it, not finite, it would pass."""
    tensor = floats(np.zeros((2, 2)))
    path = write(tmp_path / "w", {first: tensor, second: tensor})
    with pytest.raises(AdapterRefusedError, match=r"my-source: lora_. of .* comes twice"):
        check(path)


@pytest.mark.parametrize("names", [("A.weight", "B.weight"), ("embedding_A", "embedding_B")])
def test_product_of_an_embedding_is_one_too(names: tuple[str, str], tmp_path: Path) -> None:
    """By either way to name its parts; half of a product is refused."""
    ones = {f"embed_tokens.lora_{name}": floats(np.full((2, 2), 2.0)) for name in names}
    with pytest.raises(AdapterRefusedError, match="mean size of 8"):
        check(write(tmp_path / "w", ones))
    ones.popitem()
    with pytest.raises(AdapterRefusedError, match="embed_tokens has lora_A only"):
        check(write(tmp_path / "half", ones))


def test_all_bytes_of_eight_bits_are_their_numbers(tmp_path: Path) -> None:
    """The two ends of F8_E4M3: 448, and the smallest above zero."""
    for byte, value in ((0x7E, 448.0), (0x01, 2.0**-9), (0x88, -(2.0**-6)), (0x38, 1.0)):
        path = write(tmp_path / "w", {"x": ("F8_E4M3", (1,), bytes([byte]))})
        with path.open("rb") as file:
            found = adapter_weights._numbers(file, read_tensors(path)["x"], 0, 1)
        assert found.tolist() == [value]


@pytest.mark.parametrize("numbers", [16, 1 << 20])
@pytest.mark.parametrize("scale", [1.0, -0.5, 0.01])
def test_size_is_that_of_the_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: int, scale: float
) -> None:
    """As multiplying the matrices says, in one block or in many."""
    monkeypatch.setattr(adapter_weights, "_BLOCK_NUMBERS", numbers)
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(4, 33)), rng.normal(size=(27, 4))
    path = write(tmp_path / "w", {A: floats(a), B: floats(b)})
    size = abs(scale) * float(np.sqrt(((b @ a) ** 2).mean()))
    scales = LoraScales(rank=1, alpha=scale, is_rank_stabilised=False, ranks={}, alphas={})
    for limit in (size * 1.001, size * 0.999):
        try:
            check_values(path, read_tensors(path), scales, "x", lambda _, limit=limit: limit)
            assert limit > size
        except AdapterRefusedError:
            assert limit < size


def test_large_numbers_that_cancel_are_refused(tmp_path: Path) -> None:
    """A x in half precision would not be finite, however small B makes the product."""
    tiny = floats(np.full((2, 2), 1e-9))
    for pair in ({A: floats(np.full((2, 2), 1e5)), B: tiny}, {A: tiny, B: floats(np.eye(2) * 1e5)}):
        with pytest.raises(AdapterRefusedError, match=r"as large as 1e\+05 in lora_[AB]"):
            check(write(tmp_path / "w", pair))


def test_rank_beyond_all_use_is_bounded_without_its_gram_matrix(tmp_path: Path) -> None:
    """No file makes us multiply matrices of its own choice; the estimate is never too small."""
    values = floats(np.full((3000, 2), 0.01))
    path = write(tmp_path / "w", {A: values, B: floats(np.full((2, 3000), 0.01))})
    with pytest.raises(AdapterRefusedError, match="mean size"):
        check(path, LoraScales(1, 4.0, False, {}, {}))
    check(path)


def test_the_limit_is_ten_times_the_weight_it_changes(tmp_path: Path) -> None:
    """The base's weight is sampled; one that is nearly zero counts as one of usual size."""
    rng = np.random.default_rng(3)
    path = write(
        tmp_path / "w",
        {"x": floats(rng.normal(size=(500, 400)) * 0.3), "zero": floats(np.zeros((3, 3)))},
    )
    tensors = read_tensors(path)
    assert limit_for_weight(path, tensors["x"]) == pytest.approx(3.0, rel=0.05)
    assert limit_for_weight(path, tensors["zero"]) == pytest.approx(0.2)


@pytest.fixture(scope="module")
def base() -> BaseModel:
    """The embedded model as its files tell."""
    return describe_base(DEMO_MODEL_DIR, ("demo",), 16)


def test_adapters_of_all_strengths_that_make_sense_pass(base: BaseModel, tmp_path: Path) -> None:
    """Random weights many times as strong as trained ones are still no attack."""
    for strength in (0.001, 0.02, 0.04):
        check_adapter(make_adapter(tmp_path / str(strength), 1, strength), "x", base)


@pytest.mark.parametrize("strength", [1.0, 1e9, float("nan"), float("inf")])
def test_adapter_that_would_silence_the_others_is_refused(
    base: BaseModel, tmp_path: Path, strength: float
) -> None:
    """Finite and huge, or not finite: named by module."""
    folder = make_adapter(tmp_path / "a", 1, strength)
    with pytest.raises(AdapterRefusedError, match=r"model\.layers\.0"):
        check_adapter(folder, "x", base)


def test_huge_alpha_is_refused_by_the_product(base: BaseModel, tmp_path: Path) -> None:
    """A scale within its own bound still makes a product too large."""
    folder = copy_adapter(tmp_path / "a", lora_alpha=1e5)
    with pytest.raises(AdapterRefusedError, match=r"mean size|as large as"):
        check_adapter(folder, "x", base)
    assert (folder / WEIGHTS).is_file()


@pytest.mark.parametrize(
    ("dtype", "more"), [("F8_E4M3", "weight_scale_inv"), ("U8", "weight.absmax"), ("I8", "x")]
)
def test_numbers_of_a_quantised_base_are_no_measure(tmp_path: Path, dtype: str, more: str) -> None:
    """Stored as codes, they are hundreds of times as large as the weights they stand for."""
    data = bytes([0x7E]) * 64
    header = {
        "layer.weight": {"dtype": dtype, "shape": [8, 8], "data_offsets": [0, 64]},
        f"layer.{more}": {"dtype": "F32", "shape": [1], "data_offsets": [64, 68]},
    }
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data + bytes(4))
    assert describe_base(tmp_path, (), 8).limit("layer") == any_base("layer")
