"""The embedded model without its serving.properties and adapters: a test states its options."""

import shutil
from pathlib import Path

from lmi_vllm.demo import DEMO_MODEL_DIR


def plain_model(folder: Path, **options: str) -> Path:
    """Copy the model into `folder` with a serving.properties of these options."""
    leave_out = shutil.ignore_patterns("serving.properties", "adapters")
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=leave_out)
    given = {"dtype": "fp32", "enforce_eager": "true", "kv_cache_memory_bytes": "64M"} | options
    lines = [f"option.{name}={value}" for name, value in given.items()]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
