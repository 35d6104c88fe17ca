"""The numbers that Transformers' configuration classes fill in, by model type."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def class_defaults() -> Mapping[str, Mapping[str, int]]:
    """The record that scripts/record_class_defaults.py wrote."""
    record = Path(__file__).parent / "data" / "class_defaults.json"
    found: Mapping[str, Mapping[str, int]] = json.loads(record.read_text(encoding="utf-8"))
    return found
