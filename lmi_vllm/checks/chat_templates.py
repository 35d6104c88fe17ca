"""Chat templates in the files of a model or an adapter."""

import json
from pathlib import Path
from typing import Final

_FILE: Final = "chat_template.jinja"
_OTHERS: Final = ("chat_template.json", "tokenizer_config.json")
_LARGEST_BYTES: Final = 4 << 20  # of a file that is read; tokens added to a vocabulary are in it


def own_chat_template(folder: Path) -> tuple[str, str]:
    """Return the name of the file with the folder's chat template, and the template; "" if none."""
    for name in (_FILE, *_OTHERS):
        path = folder / name
        try:
            if not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
                continue
            text = path.read_text(encoding="utf-8")
            found = text if name == _FILE else json.loads(text).get("chat_template")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        if isinstance(found, str) and found.strip():
            return name, found.strip()
    return "", ""
