"""`python -m integration.bench [NAME ...] [--out DIR] [flags]`: benchmarks, and one report of them.

Without a name all of them run. Flags are those of the benchmark and need exactly one name.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from integration.bench.report import write
from integration.bench.results import Result

BENCHMARKS: Final = (
    "startup", "tokens", "direct", "serving", "requests", "bridge", "front_ends",
    "front_ends_start", "growth", "overload", "fetch", "idle_sleep",
    "cold_weights", "lora_step",
)  # fmt: skip
DEFAULT_OUT: Final = "bench-report"


@contextmanager
def own_environment() -> Iterator[None]:
    """Undo what a benchmark sets for its servers: it must not pace the engines of the next one."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    """Run the benchmarks that are named, or all, and write the report."""
    words = sys.argv[1:]
    out = DEFAULT_OUT
    if "--out" in words:
        position = words.index("--out")
        out = words[position + 1]
        del words[position : position + 2]
    count = next((n for n, word in enumerate(words) if word not in BENCHMARKS), len(words))
    names, flags = words[:count] or list(BENCHMARKS), words[count:]
    if flags and len(words[:count]) != 1:
        raise SystemExit(f"name one of {', '.join(BENCHMARKS)} before {' '.join(flags)}")
    results: dict[str, Result] = {}
    for name in names:
        print(f"== {name}", flush=True)
        sys.argv = [name, *flags]
        with own_environment():
            results[name] = importlib.import_module(f"integration.bench.{name}").main()
        results[name].print()
        # After each, so that one that fails takes nothing with it.
        print(write(results, Path(out)), flush=True)


if __name__ == "__main__":
    main()
