"""Finds the devices without importing torch."""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_COMPILER: Final = "g++"  # torch's, unless CXX names another one


@dataclass(frozen=True, slots=True)
class Devices:
    """Visible GPUs; without any, the number of CPU ranks that vLLM can place (None: any number).

    `missing_compiler` says what the system lacks to compile a model for the CPU; empty for nothing.
    """

    gpu_count: int = 0
    cpu_rank_limit: int | None = 1
    missing_compiler: str = ""


def detect_devices(environ: Mapping[str, str]) -> Devices:
    """The GPUs of this process: those in CUDA_VISIBLE_DEVICES, else those of the driver."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    installed = _installed_gpus()
    gpu_count = installed if visible is None else min(installed, _listed_gpus(visible))
    return Devices(gpu_count, _cpu_rank_limit(environ), missing_compiler(environ))


def missing_compiler(environ: Mapping[str, str]) -> str:
    """Return what torch would miss here to compile a model for the CPU, and its package, or ""."""
    words = environ.get("CXX", "").split() or [_COMPILER]
    if shutil.which(words[0], path=environ.get("PATH", os.defpath)) is None:
        return f"a C++ compiler ({words[0]}; apt-get install g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python.h (apt-get install python3-dev)"
    return ""


def ask_nvidia_smi(query: str, seconds: float = 3.0, tool: str | None = None) -> list[str]:
    """Return the lines of the driver's answer, without units; none without its tool.

    A query is of GPUs (`gpu=index`) or of what runs on them (`compute-apps=pid`).
    """
    if (tool := tool or shutil.which("nvidia-smi")) is None:
        return []
    command = [tool, f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines()


def _listed_gpus(visible: str) -> int:
    """The number of GPUs in the list; as in CUDA, nothing counts after an invalid entry."""
    counted = 0
    for part in visible.split(","):
        text = part.strip()
        if not text or text.startswith("-"):
            break
        counted += 1
    return counted


def _installed_gpus() -> int:
    """GPUs that the NVIDIA driver shows as device files, else those of nvidia-smi."""
    files = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return len(files) or sum(line.isdigit() for line in ask_nvidia_smi("gpu=index"))


def _cpu_rank_limit(environ: Mapping[str, str]) -> int | None:
    """The number of CPU ranks: one for each NUMA node, or for each binding of threads."""
    if environ.get("VLLM_CPU_OMP_THREADS_BIND"):
        return None
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return max(1, len(nodes))
