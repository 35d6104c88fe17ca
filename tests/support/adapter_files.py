"""Adapters of the embedded model for tests: good ones with own weights, and broken ones."""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from lmi_vllm.demo import DEMO_MODEL_DIR

CAPITALS = DEMO_MODEL_DIR / "adapters" / "capitals"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
Shapes = Mapping[str, tuple[int, int]]


def write_safetensors(path: Path, shapes: Shapes, draw: Callable[[], float] | None = None) -> None:
    """Write float32 matrices of zeros, or of what `draw` gives, without any library."""
    header, offset, values = {}, 0, bytearray()
    for name, (rows, columns) in shapes.items():
        size = 4 * rows * columns
        header[name] = {
            "dtype": "F32",
            "shape": [rows, columns],
            "data_offsets": [offset, offset + size],
        }
        count = rows * columns
        values += bytes(size) if draw is None else struct.pack(f"<{count}f", *_drawn(draw, count))
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(values))


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def make_adapter(folder: Path, seed: int, strength: float = 0.02, **config: object) -> Path:
    """Write an adapter like the embedded ones, with random weights that are `seed`'s own."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = Random(seed)
    shapes = {
        name: tuple(entry["shape"]) for name, entry in read_header(CAPITALS / WEIGHTS).items()
    }
    write_safetensors(folder / WEIGHTS, shapes, lambda: rng.gauss(0.0, strength * 4))
    write_config(folder, **config)
    return folder


def make_head_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of the embedded model's output layer alone."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = Random(seed)
    model = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    hidden, vocabulary = model["hidden_size"], model["vocab_size"]
    name = "base_model.model.lm_head.lora_"
    shapes = {f"{name}A.weight": (16, hidden), f"{name}B.weight": (vocabulary, 16)}
    write_safetensors(folder / WEIGHTS, shapes, lambda: rng.gauss(0.0, 0.1))
    write_config(folder, target_modules=["lm_head"])
    return folder


def write_config(folder: Path, **changes: object) -> None:
    """Write the embedded adapters' configuration with `changes`."""
    config = json.loads((CAPITALS / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def copy_adapter(folder: Path, source: Path = CAPITALS, **config: object) -> Path:
    """Write a copy of an embedded adapter, with `config` changed."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if config:
        write_config(folder, **config)
    return folder


def _drawn(draw: Callable[[], float], count: int) -> list[float]:
    return [draw() for _ in range(count)]
