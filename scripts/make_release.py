#!/usr/bin/env python3
"""Build what a release consists of into dist/: sdist, wheel, and a CycloneDX SBOM for each extra.

The version is read from lmi_vllm/_version.py and must have its heading in CHANGELOG.md; `--draft`
builds without one. Needs the `dev` extra.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
DIST: Final = ROOT / "dist"
CONSTRAINTS: Final = ROOT / "config" / "constraints"
SBOM_EXTRAS: Final = ("base", "cpu", "cuda")


def main() -> int:
    """Build everything; return the exit code."""
    version = read_version()
    is_draft = "--draft" in sys.argv
    if not is_draft and not has_heading(version):
        print(f"make_release: CHANGELOG.md has no heading [{version}]: name the release there")
        return 1
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True)
    for extra in SBOM_EXTRAS:
        path = DIST / f"lmi_vllm-{version}-{extra}.cdx.json"
        path.write_text(json.dumps(bill_of_materials(extra, version), indent=2), encoding="utf-8")
        print(f"made {path.relative_to(ROOT)}")
    return 0


def read_version() -> str:
    """Return the version from the one place that states it."""
    text = (ROOT / "lmi_vllm" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit("make_release: lmi_vllm/_version.py states no version")
    return found[1]


def has_heading(version: str) -> bool:
    """Whether the changelog names the version."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE) is not None


def bill_of_materials(extra: str, version: str) -> dict[str, Any]:
    """Return the SBOM of an extra: us, and every package of its constraints with its hashes."""
    hashes = CONSTRAINTS / f"{extra}-hashes.txt"
    source = hashes if hashes.exists() else CONSTRAINTS / f"{extra}.txt"
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "pyproject.toml"  # cyclonedx-py reads the root component from it
        project.write_text(
            f'[project]\nname = "lmi-vllm"\nversion = "{version}"\nlicense = "Apache-2.0"\n',
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "cyclonedx_py", "requirements", str(source)]
        command += ["--pyproject", str(project), "--mc-type", "application"]
        command += ["--output-reproducible", "--of", "JSON", "--sv", "1.6"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
    document: dict[str, Any] = json.loads(answer.stdout)
    return document


if __name__ == "__main__":
    sys.exit(main())
