"""`python -m integration.bench [NAME] [flags]`: run one benchmark, or all of them in turn."""

import importlib
import sys

BENCHMARKS = ("startup", "tokens", "fetch", "overload")


def main() -> None:
    """Run the benchmark named first, or each in turn."""
    names = [name for name in sys.argv[1:2] if name in BENCHMARKS] or list(BENCHMARKS)
    flags = [word for word in sys.argv[1:] if word not in BENCHMARKS]
    for name in names:
        print(f"== {name}", flush=True)
        sys.argv = [name, *flags]
        importlib.import_module(f"integration.bench.{name}").main()


if __name__ == "__main__":
    main()
