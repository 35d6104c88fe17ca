"""Whether there is memory to load a model at all: `required_memory_mb` and `reserved_memory_mb`."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import Settings

MIB: Final = 1 << 20
_NVIDIA_SMI_SECONDS: Final = 10.0
_REQUIRED: Final = "required_memory_mb"
_RESERVED: Final = "reserved_memory_mb"
# Limit and usage of a control group, of version 2 and 1.
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def memory_errors(
    settings: Settings, root: Path = Path("/"), nvidia_smi: str | None = None
) -> list[str]:
    """Return what is wrong with the free memory; only what a setting asks for is looked at.

    `root` is where `proc` and `sys` are; `nvidia_smi` the program that tells a GPU's free memory.
    """
    errors = []
    if asked := _asked(settings, ""):
        errors += _missing(settings, "", asked, "this machine", free_host_memory(root))
    if asked := _asked(settings, "gpu."):
        free = free_gpu_memory(nvidia_smi or shutil.which("nvidia-smi"))
        if not free:
            errors.append(f"{asked.label}: no GPU says how much memory it has (nvidia-smi)")
        for index, bytes_free in enumerate(free):
            errors += _missing(settings, "gpu.", asked, f"GPU {index}", bytes_free)
    return errors


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process may still take: of the machine, and of its control group where limited."""
    found = [
        bytes_free
        for bytes_free in (_available(root), *(_group(root, *names) for names in _CGROUP_FILES))
        if bytes_free is not None
    ]
    return min(found, default=None)


def free_gpu_memory(nvidia_smi: str | None) -> list[int]:
    """Bytes free on each GPU the driver shows; empty without one."""
    if nvidia_smi is None:
        return []
    command = [nvidia_smi, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(line) * MIB for line in listing.stdout.split() if line.isdigit()]


def _asked(settings: Settings, prefix: str) -> Setting | None:
    """The setting that asks for a check; the default of the reserve alone does not."""
    found = (settings.server.detail(prefix + name) for name in (_REQUIRED, _RESERVED))
    return next((setting for setting in found if setting is not None and setting.is_set), None)


def _missing(
    settings: Settings, prefix: str, asked: Setting, place: str, bytes_free: int | None
) -> list[str]:
    if bytes_free is None:
        return [f"{asked.label}: the free memory of {place} cannot be read"]
    server = settings.server
    required, reserved = server.required_memory_mb, server.reserved_memory_mb
    if prefix:
        required = server.gpu_required_memory_mb or 0
        reserved = server.gpu_reserved_memory_mb or 0
    if required + reserved <= bytes_free // MIB:
        return []
    return [
        f"{asked.label}: not enough memory on {place} to load the model: {required} MiB "
        f"({prefix}{_REQUIRED}) and {reserved} MiB to stay free ({prefix}{_RESERVED}), "
        f"{bytes_free // MIB} MiB are available"
    ]


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(size) * 1024 for size in sizes), None)


def _group(root: Path, limit: str, usage: str) -> int | None:
    """Bytes a container has left (its own group is at the root of what it sees); None: no limit."""
    folder = root / "sys/fs/cgroup"
    try:
        highest, used = (folder / limit).read_text().strip(), (folder / usage).read_text().strip()
    except OSError:
        return None
    return max(0, int(highest) - int(used)) if highest.isdigit() and used.isdigit() else None
