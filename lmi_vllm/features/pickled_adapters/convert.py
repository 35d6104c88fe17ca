"""Converts an untrusted pickle of tensors to safetensors, in a child process that can be killed.

The child runs this file as a script, so it imports no module of this package. A pickle of a
kilobyte can ask for any amount of memory or time while it is read: there it gets some beyond what
torch takes.
"""

import io
import re
import resource
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

CHILD_SECONDS: Final = 300.0  # it imports torch first
CPU_SECONDS: Final = 60
MEMORY_BYTES: Final = 1 << 30
MAX_LIST_BYTES: Final = 4 << 20  # of an archive's entries: 28000 with names of 100 characters
MAX_EXPANSION: Final = 4  # times the file: a tensor may be in it under several names


def convert(pickle: Path, weights: Path) -> str:
    """Write the tensors of `pickle` to `weights`; returns why that cannot be, empty where it is."""
    command = [sys.executable, "-I", __file__, str(pickle), str(weights)]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "takes too long to read"
    if child.returncode:
        return f"cannot be read: {child.stdout.strip() or 'it takes too much memory or time'}"
    return ""


class _BoundedList(io.FileIO):
    """A file that gives few bytes at a time: `zipfile` reads the whole list of entries at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_LIST_BYTES:
            raise ValueError(f"its list of entries has more than {MAX_LIST_BYTES} bytes")
        return super().read(size) or b""


def _check_growth(pickle: Path) -> None:
    """Raise ValueError for an archive that may unpack to more: torch.save compresses nothing."""
    if not zipfile.is_zipfile(pickle):
        return
    with _BoundedList(pickle) as file, zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed, which torch.save never does")
    if sum(entry.file_size for entry in entries) > pickle.stat().st_size:
        raise ValueError("its entries are larger than the file")


def main() -> None:
    """Convert in the child; what is wrong goes to stdout, and the process ends with 1."""
    import torch  # noqa: PLC0415 (the limits are beyond what it takes)
    from safetensors.torch import save_file  # noqa: PLC0415

    pickle, weights = map(Path, sys.argv[1:])
    size = pickle.stat().st_size
    _limit(2 * MAX_EXPANSION * size + MEMORY_BYTES)
    try:
        _check_growth(pickle)
        tensors = torch.load(pickle, map_location="cpu", weights_only=True)
        save_file(_own(tensors, MAX_EXPANSION * size), weights)
    except Exception as error:  # noqa: BLE001 (an untrusted pickle)
        sys.stdout.write(_reason(str(error))[:500])
        sys.exit(1)


def _reason(text: str) -> str:
    """Return what is wrong, without torch's advice to run the code that may be in the file."""
    match = re.search(r"GLOBAL \S+|(?<=WeightsUnpickler error:)\s*.+", text)
    return f"it holds more than tensors: {match[0].strip()}" if match else text


def _limit(more_bytes: int) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    statm = Path("/proc/self/statm")
    if statm.exists():  # Linux
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, used + more_bytes))


def _own(tensors: Any, most_bytes: int) -> dict[str, Any]:
    """Return tensors that share no memory, as safetensors wants them.

    Raises:
        ValueError: they are larger than a file of this size can hold: a view can repeat a few
            bytes without end.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > most_bytes:
        raise ValueError(f"its tensors have {size} bytes, many times those of the file")
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


if __name__ == "__main__":
    main()
