"""Records what the configuration classes of the installed Transformers fill in.

    .venv/bin/python scripts/record_class_defaults.py

Transformers saves only what differs from its class, so a published config.json may lack the number
of heads. The server does not import Transformers for `validate` or at its start: it reads this.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

RECORD: Final = Path(__file__).resolve().parents[1] / "lmi_vllm/config/data/class_defaults.json"
_NEEDED: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NAMES: Final = (
    *_NEEDED, "intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "sliding_window", "tie_word_embeddings",
)  # fmt: skip


def recorded() -> dict[str, dict[str, int]]:
    """The numbers of each decoder's class by model type, where it has the common names itself."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  # only here: it takes seconds

    found = {kind: _of_class(CONFIG_MAPPING[kind]) for kind in sorted(CONFIG_MAPPING)}
    return {kind: numbers for kind, numbers in found.items() if set(_NEEDED) <= set(numbers)}


def _of_class(kind: Any) -> dict[str, int]:
    """The class's numbers as they are declared: what it computes from others is left out.

    Whether the output shares the embedding's weights is among them where it does.
    """
    numbers = {name: getattr(kind, name, None) for name in _NAMES}
    if hasattr(kind, "use_sliding_window"):  # it decides, and says no where it is not set
        del numbers["sliding_window"]
    if set(_NAMES) & set(getattr(kind, "attribute_map", None) or {}):
        return {}
    return {name: value for name, value in numbers.items() if type(value) is int or value is True}


def text_of(record: Mapping[str, Mapping[str, int]]) -> str:
    """The file's text, one line for each model type."""
    lines = (f"{json.dumps(kind)}: {json.dumps(record[kind])}" for kind in record)
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Write the record."""
    RECORD.write_text(text_of(recorded()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
