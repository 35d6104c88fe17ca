"""What platforms forget: open files, shared memory. Raised where we may, named where we may not."""

import resource
import shutil
from pathlib import Path
from typing import Final

# Besides connections: weights, sockets of the engine, adapters, logs.
OWN_FILES: Final = 256
SHARED_MEMORY: Final = Path("/dev/shm")
# NCCL and vLLM's broadcast buffers take this much for each process (vLLM's docs advise --ipc=host).
SHARED_BYTES_EACH: Final = 256 << 20


def raise_open_files(job_queue_size: int) -> list[str]:
    """Raise the open-file limit to its hard bound; returns what to warn about."""
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
    """Return a warning where `folder` is too small for so many processes of one model copy."""
    needed = processes * SHARED_BYTES_EACH
    if processes < 2 or not folder.is_dir():  # noqa: PLR2004 - one process shares with nobody
        return []
    total = shutil.disk_usage(folder).total
    if total >= needed:
        return []
    return [
        f"{folder} has {total >> 20} MiB; tensor parallelism over {processes} GPUs wants "
        f"{needed >> 20} MiB: docker run --shm-size or --ipc=host"
    ]
