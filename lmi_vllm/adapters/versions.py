"""The version of an adapter's files: what tells changed files without reading them."""

import hashlib
from pathlib import Path
from typing import Final

_CODE_FILE: Final = "model.py"  # code may import and read what lies in folders, too
_COMPILED: Final = "__pycache__"  # Python's own, written by an import


def version_of(path: str) -> str:
    """Return a digest of the folder and of each file's name, number, size and times."""
    folder = Path(path)
    has_code = (folder / _CODE_FILE).exists()
    found = [str(folder)]
    for file in sorted(folder.rglob("*") if has_code else folder.glob("*")):
        if _COMPILED in file.parts:
            continue
        try:
            status = file.stat()
        except OSError:  # it has gone, or is a link to nothing
            continue
        if not file.is_dir():
            times = (status.st_mtime_ns, status.st_ctime_ns)
            found.append(f"{file}\0{status.st_ino}\0{status.st_size}\0{times}")
    return hashlib.sha256("\0\0".join(found).encode("utf-8", "surrogateescape")).hexdigest()
