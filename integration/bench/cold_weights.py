"""Seconds to ready with weights that are on the disk alone, read ahead or not.

    python -m integration.bench cold_weights [--rounds 3] [--layers 16] [--all-cold] [--disk 125]

A model of random weights, 2.2 GB with 16 layers. Its files are dropped from the page cache before
each start; with `--all-cold` (root) everything is, vLLM's and torch's libraries too. `--disk`
(root, control groups of version 1) lets the disk read so many MiB a second: 125 is what a gp3
volume of AWS gives unless more is paid for.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from integration.bench.results import Claim, Result, Table, spread
from integration.bench.servers import free_port, is_healthy, start, stop, wait
from lmi_vllm.demo import DEMO_MODEL_DIR

HIDDEN, FFN, FILES = 2048, 8192, 4
VARIABLE: Final = "LMI_READ_AHEAD"
PROPERTIES: Final = """
option.dtype=bf16
option.max_model_len=512
option.kv_cache_memory_bytes=268435456
option.enforce_eager=true
"""
_GROUPS: Final = Path("/sys/fs/cgroup/blkio")
_DROP: Final = Path("/proc/sys/vm/drop_caches")
_READ: Final = re.compile(r"weights: read ahead [^\"]*")


def write_model(folder: Path, layers: int) -> Path:
    """Write a Llama of random weights in files of equal size, with the embedded tokenizer."""
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=shutil.ignore_patterns("adapters", "model.*"))
    config = json.loads((folder / "config.json").read_bytes())
    config |= {
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": HIDDEN // 16,
        "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "serving.properties").write_text(PROPERTIES, encoding="utf-8")
    shapes = list(_shapes(layers, config["vocab_size"]))
    each = -(-len(shapes) // FILES)
    for place in range(FILES):
        path = folder / f"model-{place + 1:05}-of-{FILES:05}.safetensors"
        _write(path, dict(shapes[place * each : (place + 1) * each]))
    return folder


def _shapes(layers: int, words: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (words, HIDDEN)
    for layer in range(layers):
        start = f"model.layers.{layer}."
        for name in "qkvo":
            yield f"{start}self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        yield f"{start}mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{start}mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{start}mlp.down_proj.weight", (HIDDEN, FFN)
        yield f"{start}input_layernorm.weight", (HIDDEN,)
        yield f"{start}post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def _write(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write tensors of the same random numbers: bfloat16 is the upper half of a float32."""
    noise = np.random.default_rng(1).normal(0, 0.02, 1 << 22).astype(np.float32)
    block = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            at -= file.write(block[: min(len(block), at)])
        file.flush()
        os.fsync(file.fileno())


def make_cold(folder: Path, *, is_all: bool) -> None:
    """Drop the files from the page cache, or all that it holds."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_all:
        _DROP.write_text("1", encoding="ascii")


@contextlib.contextmanager
def slow_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """Let this process and those that it starts read so much a second from the folder's disk.

    Raises:
        OSError: the folder is on no disk of its own, or there are no control groups of version 1.
    """
    device = folder.stat().st_dev
    group = _GROUPS / f"lmi-vllm-bench-{os.getpid()}"
    group.mkdir()
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {mebibytes << 20}"
        (group / "blkio.throttle.read_bps_device").write_text(limit, encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        (_GROUPS / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        group.rmdir()


def measure(folder: Path, log: Path, *, reads_ahead: bool) -> tuple[float, str]:
    """Return the seconds to ready, and what was read ahead."""
    port = free_port()
    command = [sys.executable, "-m", "lmi_vllm", "serve", "--model", str(folder)]
    environ = {VARIABLE: str(reads_ahead).lower(), "VLLM_LOGGING_LEVEL": "INFO"}
    began = time.monotonic()
    process = start([*command, "--port", str(port)], environ, log)
    try:
        wait(process, lambda: is_healthy(port, "/ping"))
        seconds = time.monotonic() - began
    finally:
        stop(process)
    found = _READ.search(log.read_text(encoding="utf-8", errors="replace"))
    return seconds, found[0] if found else ""


def main() -> Result:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--all-cold", action="store_true")
    parser.add_argument("--disk", type=int, default=0, help="MiB a second; 0: as it is")
    parser.add_argument("--folder", type=Path, help="where the model is kept")
    options = parser.parse_args()
    found: dict[bool, list[float]] = {True: [], False: []}
    notes = []
    with contextlib.ExitStack() as stack:
        root = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-weights-"))
        )
        folder = root / "model"
        if not folder.exists():
            write_model(folder, options.layers)
        if options.disk:
            stack.enter_context(slow_disk(folder, options.disk))
        for _ in range(options.rounds):
            for reads_ahead in (False, True):
                make_cold(folder, is_all=options.all_cold)
                seconds, said = measure(folder, root / "log", reads_ahead=reads_ahead)
                found[reads_ahead].append(seconds)
                notes += [said] if said else []
    rows = [["on" if on else "off", spread(seconds)] for on, seconds in found.items()]
    fastest = {on: sorted(seconds)[len(seconds) // 2] for on, seconds in found.items()}
    cold = "everything" if options.all_cold else "the weights"
    disk = f", which reads {options.disk} MiB/s" if options.disk else ""
    return Result(
        [Table(f"Seconds to ready, {cold} on the disk alone{disk}", [VARIABLE, "ready"], rows)],
        [Claim("ready, read ahead / not", fastest[True] / fastest[False], 1.0)],
        notes=notes,
    )
