"""The file that keeps adapters registered over the API from one start to the next.

It holds what clients gave, never weights. Off unless `option.adapters_state` names it.
"""

import json
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from lmi_vllm.errors import ModelSourceError

logger = logging.getLogger(__name__)

VERSION: Final = 1
Entry = dict[str, Any]


def read_state(path: Path) -> list[Entry]:
    """Return the entries of the file, none where there is no file.

    Raises:
        ModelSourceError: it cannot be read; starting all the same would write over it.
    """
    try:
        if not path.exists():
            return []
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']} is not known here")
        return [_checked(entry) for entry in document["adapters"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(
            f"option.adapters_state {path} cannot be read ({type(error).__name__}: {error}). "
            "Repair it, or remove it to start without its adapters"
        ) from error


def write_state(path: Path, entries: Collection[Entry]) -> None:
    """Replace the file at once; a disk that refuses is logged, the adapters go on working."""
    text = json.dumps({"version": VERSION, "adapters": list(entries)}, indent=2) + "\n"
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with work.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        work.replace(path)
    except OSError as error:
        logger.error(
            "adapters_state %s cannot be written; adapters registered now will be missing after "
            "the next start: %s",
            path,
            error,
        )


def _checked(entry: Entry) -> Entry:
    return {
        "name": str(entry["name"]),
        "src": str(entry["src"]),
        "preload": bool(entry.get("preload", True)),
        "pin": bool(entry.get("pin", False)),
        "options": {str(name): str(value) for name, value in entry.get("options", {}).items()},
    }
