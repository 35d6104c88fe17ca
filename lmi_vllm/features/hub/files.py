"""Which files of a hub repository vLLM will read. Pure: names in, names out.

Its weights are those of `checks/weight_formats.py`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from lmi_vllm.checks.weight_formats import is_for_inference, weights_among

DEFAULT_IGNORE_PATTERNS: Final = ("original/**/*", "original/*")

# Configuration, tokenizer, chat template, processor and custom code.
_SUPPORT_SUFFIXES: Final = (
    ".json", ".jinja", ".model", ".py", ".spm", ".tiktoken", ".txt", ".vocab", ".yaml", ".yml",
)  # fmt: skip
# Mistral's own tokenizer before Tekken: tokenizer.model.v3
_VERSIONED: Final = re.compile(r"(.*/)?tokenizer\.model\.v\d+\w*")


@dataclass(frozen=True, slots=True)
class FileSelection:
    """The files to fetch, and which of them are weights."""

    files: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def has_weights(self) -> bool:
        """Whether there is anything for the engine to load."""
        return bool(self.weights)


def select_files(
    names: Iterable[str], load_format: str | None, ignore_patterns: Sequence[str] | None
) -> FileSelection:
    """The files of a repository that vLLM reads with `load_format`.

    `ignore_patterns` replaces the default one, which leaves out `original/`.
    """
    ignored = DEFAULT_IGNORE_PATTERNS if ignore_patterns is None else tuple(ignore_patterns)
    kept = [name for name in names if _is_wanted(name, ignored)]
    weights = weights_among(kept, load_format)
    support = [name for name in kept if _is_support(name)]
    is_consolidated = any(name.rpartition("/")[2].startswith("consolidated") for name in weights)
    if not is_consolidated and "config.json" in support:
        # With Mistral's own params.json beside it, vLLM would look for the consolidated weights.
        support = [name for name in support if name != "params.json"]
    files = sorted({*support, *weights})
    return FileSelection(tuple(files), tuple(sorted(weights)))


def _is_support(name: str) -> bool:
    return name.endswith(_SUPPORT_SUFFIXES) or _VERSIONED.fullmatch(name) is not None


def _is_wanted(name: str, ignored: Sequence[str]) -> bool:
    return is_for_inference(name) and not any(fnmatchcase(name, pattern) for pattern in ignored)
