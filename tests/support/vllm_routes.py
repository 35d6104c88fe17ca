"""The recorded routes of vLLM's releases, and what is said to be done with each."""

import importlib
import sys
from pathlib import Path
from typing import Any, Final

SCRIPTS: Final = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str) -> Any:
    """Return a module of scripts/."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(name)
