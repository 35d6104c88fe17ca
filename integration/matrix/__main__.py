"""`make matrix`: every architecture that has no result yet, then the page.

    python -m integration.matrix [NAME...] [--again]

With names, only those; `--again` runs what has a result too. A run that was cut goes on.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from integration.torchvision_copy import torchvision_copy

sys.path.insert(0, str(torchvision_copy()))  # before transformers looks for it

from integration.matrix.checkpoints import ARCHITECTURES
from integration.matrix.page import PAGE, RESULTS, page
from integration.matrix.run import run, save


def main() -> int:
    """Run and write; 0 whatever was found, for what does not work is a result too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    if unknown := set(asked.names) - {row.name for row in ARCHITECTURES}:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    for row in ARCHITECTURES:
        if asked.names and row.name not in asked.names:
            continue
        if (RESULTS / f"{row.name}.json").is_file() and not asked.again:
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(row, Path(folder))
        save(outcome, RESULTS)
        print(f"{row.name}: {'works' if outcome.works else outcome.error}", flush=True)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
