"""The embedded demo model: a tiny Llama with two LoRA adapters; `scripts/demo` makes it."""

from pathlib import Path
from typing import Final

DEMO_MODEL_DIR: Final[Path] = Path(__file__).parent / "model"
