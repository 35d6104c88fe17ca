"""The figures of a start in words: for the log, the terminal, the console and the summary."""

from collections.abc import Mapping
from typing import Final

_BYTES: Final = "bytes"
# Of a phase or step: the figure, its total, and the unit.
_SHARES: Final = (
    ("download", "bytes", "bytes_total", _BYTES),
    ("weights", "weight_bytes", "weight_bytes_total", _BYTES),
    ("weights", "weight_files", "weight_files_total", "files"),
    ("graphs", "graphs", "graphs_total", "graphs"),
)
# Of a step: the figure, and words about it.
_AMOUNTS: Final = (
    ("weights", "weights_gib", "{:g} GiB in memory"),
    ("compilation", "compiled", "compiled"),
    ("compilation", "from_cache", "from the cache"),
    ("KV cache", "kv_cache_gib", "{:g} GiB"),
    ("KV cache", "kv_cache_tokens", "{:,.0f} tokens"),
)


def in_words(step: str, figures: Mapping[str, object]) -> list[str]:
    """Return what there is to say about a step, or about the download."""
    shares = [
        _share(_number(figures.get(done)), _number(figures[total]), unit)
        for of, done, total, unit in _SHARES
        if of == step and figures.get(total)
    ]
    amounts = [
        words.format(figures[name])
        for of, name, words in _AMOUNTS
        if of == step and name in figures
    ]
    return shares + amounts


def steps_in_words(seconds: Mapping[str, float], figures: Mapping[str, object]) -> list[str]:
    """Return each step with its seconds and figures: `weights 2.1 s (16.06 of 16.06 GB)`."""
    return [
        f"{step} {spent:.1f} s" + (f" ({', '.join(words)})" if words else "")
        for step, spent in seconds.items()
        for words in [in_words(step, figures)]
    ]


def _share(done: float, total: float, unit: str) -> str:
    if unit == _BYTES:
        size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")  # noqa: PLR2004 (a GB)
        done, total = done / size, total / size
    return f"{done:.4g} of {total:.4g} {unit}"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
