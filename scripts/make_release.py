#!/usr/bin/env python3
"""Cut a release: name it in CHANGELOG.md, and build sdist, wheel and SBOMs into dist/.

`make_release.py 0.2.0` writes the version to lmi_vllm/_version.py and moves the entries of
`## [Unreleased]` below `## [0.2.0] - <today>`, then builds. Without a version it builds the one
stated, and cuts it first where CHANGELOG.md has no heading for it. `--draft` builds and changes
nothing. Needs the `dev` extra.
"""

import argparse
import datetime
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
VERSION_FILE: Final = "lmi_vllm/_version.py"
VERSION: Final = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
SBOM_EXTRAS: Final = ("base", "cpu", "cuda")


def main(arguments: list[str]) -> int:
    """Cut and build the release; return the exit code."""
    parser = argparse.ArgumentParser(prog="make_release", description=__doc__)
    parser.add_argument("version", nargs="?", help="the version to cut, such as 0.2.0")
    parser.add_argument("--draft", action="store_true", help="build without a changelog heading")
    options = parser.parse_args(arguments)
    if options.version and options.draft:
        parser.error("--draft builds the stated version and takes none")
    if not options.draft:
        today = datetime.datetime.now(datetime.UTC).date()
        try:
            cut(ROOT, options.version or read_version(ROOT), today)
        except ValueError as error:
            print(f"make_release: {error}")
            return 1
    build(read_version(ROOT))
    return 0


def cut(root: Path, version: str, today: datetime.date) -> None:
    """Have the version stated in `root`, with its heading in the changelog.

    Raises:
        ValueError: the version is malformed, or nothing is there to release; nothing is written.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", version):
        raise ValueError(f"{version!r} is no version: it looks like 0.2.0 or 0.2.0rc1")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    if f"\n## [{version}]" in text:
        if version != read_version(root):
            raise ValueError(f"CHANGELOG.md has a heading [{version}] already")
        return
    changelog.write_text(with_release(text, version, today), encoding="utf-8")
    stated = root / VERSION_FILE
    source = stated.read_text(encoding="utf-8")
    stated.write_text(VERSION.sub(f'__version__ = "{version}"', source), encoding="utf-8")


def with_release(changelog: str, version: str, today: datetime.date) -> str:
    """Return the changelog with the unreleased entries below a heading of version and date.

    Raises:
        ValueError: there is no heading `## [Unreleased]`, or no entry below it.
    """
    before, heading, rest = changelog.partition("\n## [Unreleased]\n")
    if not heading:
        raise ValueError("CHANGELOG.md has no heading [Unreleased]")
    entries, earlier, released = rest.partition("\n## [")
    if not re.search(r"^\s*- ", entries, re.MULTILINE):
        raise ValueError(f"CHANGELOG.md has no entry below [Unreleased] for {version}")
    named = f"\n## [{version}] - {today.isoformat()}\n\n{entries.strip()}\n"
    return f"{before}{heading}{named}{earlier}{released}"


def read_version(root: Path) -> str:
    """Return the version from the one place that states it."""
    found = VERSION.search((root / VERSION_FILE).read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"make_release: {VERSION_FILE} states no version")
    return found[1]


def build(version: str) -> None:
    """Make sdist, wheel and SBOMs in dist/."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True)
    for extra in SBOM_EXTRAS:
        path = DIST / f"lmi_vllm-{version}-{extra}.cdx.json"
        path.write_text(json.dumps(bill_of_materials(extra, version), indent=2), encoding="utf-8")
        print(f"made {path.relative_to(ROOT)}")


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
    sys.exit(main(sys.argv[1:]))
