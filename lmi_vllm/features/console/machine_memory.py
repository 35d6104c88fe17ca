"""Memory in use: of processes and containers on Linux, of GPUs by nvidia-smi.

Read from `/proc` and control groups and not through torch, which would allocate GPU memory for a
CUDA context.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lmi_vllm.host_memory import free_host_memory, total_host_memory
from lmi_vllm.translate.devices import ask_nvidia_smi

_QUERY: Final = "index,name,memory.used,memory.total,utilization.gpu"
_MIB: Final = 1 << 20


def memory_in_use(pid: int | None = None, root: Path = Path("/")) -> dict[str, int]:
    """Return bytes resident of `server` and `engine`, `total` and `available`; {} off Linux.

    `total` is the container's limit where that is below the machine's memory.
    """
    own, proc = pid or os.getpid(), root / "proc"
    server, total = _resident(proc, own), total_host_memory(root)
    if server is None or total is None:
        return {}
    engine = sum(_resident(proc, child) or 0 for child in _descendants(proc, own))
    available = free_host_memory(root) or 0
    return {"server": server, "engine": engine, "total": total, "available": available}


def gpus_in_use(visible: str | None = None) -> list[dict[str, object]]:
    """Return each GPU's name, memory in bytes and load in percent, from nvidia-smi; [] without it.

    `visible` is CUDA_VISIBLE_DEVICES: with it only the GPUs of those numbers.
    """
    wanted = None if visible is None else {part.strip() for part in visible.split(",")}
    numbered = wanted is not None and all(part.isdecimal() for part in wanted)
    lines = ask_nvidia_smi(f"gpu={_QUERY}")
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [
        {
            "index": row[0],
            "name": row[1],
            "used": int(row[2]) * _MIB,
            "total": int(row[3]) * _MIB,
            "load": int(row[4]) if row[4].isdecimal() else None,
        }
        for row in rows
        if _is_complete(row) and (wanted is None or not numbered or row[0] in wanted)
    ]


def _is_complete(row: list[str]) -> bool:
    return len(row) == len(_QUERY.split(",")) and row[2].isdecimal() and row[3].isdecimal()


def _resident(proc: Path, pid: int) -> int | None:
    """Return the bytes of a process that are in memory; None when there is no such process."""
    try:
        pages = (proc / str(pid) / "statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _descendants(proc: Path, pid: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            # The name, in brackets, may hold anything; the parent is the second field after it.
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        parent = int(fields.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(folder.name))
    unvisited = list(children.get(pid, ()))
    while unvisited:
        child = unvisited.pop()
        yield child
        unvisited += children.get(child, ())
