"""`make matrix`: every architecture that has no result yet, then the page.

    python -m integration.matrix [NAME...] [--again] [--only models|adapters]

With names, only those; `--again` runs what has a result too. A run that was cut goes on. Each model
is compared once without adapters and once with them; `--only` leaves the other half out.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from integration.package_copies import torchvision_copy

sys.path.insert(0, str(torchvision_copy()))  # before transformers looks for it

from integration.matrix import adapters, run
from integration.matrix.checkpoints import ARCHITECTURES, Architecture
from integration.matrix.page import ADAPTER_RESULTS, PAGE, RESULTS, page


def main() -> int:
    """Run and write; 0 whatever was found, for what does not work is a result too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--only", choices=("models", "adapters"), default="")
    asked = parser.parse_args()
    if unknown := set(asked.names) - {row.name for row in ARCHITECTURES}:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    for row in ARCHITECTURES:
        if asked.names and row.name not in asked.names:
            continue
        if asked.only != "adapters" and _is_due(row, RESULTS, again=asked.again):
            _compare_model(row)
        if asked.only == "models" or row.group != "models" or row.tokenizer or not _reads_text(row):
            continue
        if _is_due(row, ADAPTER_RESULTS, again=asked.again):
            _compare_adapters(row)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def _is_due(row: Architecture, results: Path, *, again: bool) -> bool:
    return again or not (results / f"{row.name}.json").is_file()


def _reads_text(row: Architecture) -> bool:
    """Whether answers to text are right, which adapters are compared by."""
    result = RESULTS / f"{row.name}.json"
    return result.is_file() and json.loads(result.read_text("utf-8"))["tokens"] > 0


def _compare_model(row: Architecture) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcome = run.run(row, Path(folder))
    run.save(outcome, RESULTS)
    print(f"{row.name}: {'works' if outcome.works else outcome.error}", flush=True)


def _compare_adapters(row: Architecture) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcome = adapters.run(row, Path(folder))
    run.save(outcome, ADAPTER_RESULTS)
    said = outcome.error or f"{outcome.works}, refused {list(outcome.refused)}"
    print(f"{row.name}, adapters: {said}", outcome.wrong or "", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
