"""Limits of the machine or container: open files (raised), cache folders (checked)."""

import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.private_folders import SHARED_MEMORY

# For connections, weights, sockets of the engine, adapters, logs.
OWN_FILES: Final = 256
# NCCL and vLLM's broadcast buffers take this much for each process (vLLM's docs advise --ipc=host).
SHARED_BYTES_EACH: Final = 256 << 20
# Folders that the hub library and vLLM write to, and the variables that move them.
CACHE_FOLDERS: Final[Mapping[str, str]] = MappingProxyType(
    {"HF_HOME": "~/.cache/huggingface", "VLLM_CACHE_ROOT": "~/.cache/vllm"}
)


def raise_open_files(job_queue_size: int) -> list[str]:
    """Raise the open-file limit to its hard limit; return what to warn about."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = job_queue_size + OWN_FILES
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return []
    return [
        f"the limit of open files is {hard}; job_queue_size={job_queue_size} needs about {needed}: "
        "raise it (ulimit -Hn, docker run --ulimit nofile=65536)"
    ]


def check_shared_memory(processes: int, folder: Path = SHARED_MEMORY) -> list[str]:
    """Return a warning if `folder` is too small for the processes of one model copy."""
    needed = processes * SHARED_BYTES_EACH
    if processes < 2 or not folder.is_dir():  # noqa: PLR2004 - one process shares nothing
        return []
    total = shutil.disk_usage(folder).total
    if total >= needed:
        return []
    return [
        f"{folder} has {total >> 20} MiB; tensor parallelism over {processes} GPUs wants "
        f"{needed >> 20} MiB: docker run --shm-size or --ipc=host"
    ]


def check_cache_folders(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each cache folder that cannot be written or created."""
    warnings = []
    for variable in CACHE_FOLDERS:
        folder = cache_folder(variable, environ)
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            warnings.append(
                f"the cache folder {folder} cannot be written ({existing} does not allow it): set "
                f"{variable} to one that can"
            )
    return warnings


def check_temporary_folder(environ: Mapping[str, str]) -> list[str]:
    """Return a warning if the folder that is set is not used: Python takes another silently."""
    wanted, used = environ.get("TMPDIR"), tempfile.gettempdir()
    if not wanted or Path(wanted).absolute() == Path(used):
        return []
    return [
        f"TMPDIR={wanted} cannot be written (not there, full or not allowed): temporary files are "
        f"in {used}"
    ]


def cache_folder(variable: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of one of `CACHE_FOLDERS`, as it is set or by default."""
    default, home = CACHE_FOLDERS[variable], environ.get("XDG_CACHE_HOME")
    usual = default.replace("~/.cache", home) if home else default
    return Path(environ.get(variable) or usual).expanduser()
