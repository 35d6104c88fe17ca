"""The code blocks of the documentation: what each is, what it needs, what it says it prints.

A block of commands (`console`, `sh`, `python`) is run as written, unless a comment on the line
before it says what it would need: `<!-- needs: gpu -->`. Data has its own languages.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mkdocs.utils import is_markdown_file

ROOT: Final = Path(__file__).resolve().parents[2]
COMMANDS: Final = ("console", "sh", "python")
DATA: Final = ("json", "properties", "text", "yaml", "ini")
# What a machine with only our development environment may lack. `index` and `setup` are commands
# that install something, which integration/packages_install_clean.py and CI itself do.
NEEDS: Final = MappingProxyType(
    {
        "gpu": "an NVIDIA GPU",
        "cloud": "AWS or a cluster",
        "docker": "a container engine",
        "systemd": "a machine to install on",
        "hub": "a model hub",
        "index": "the package index, or an environment to install into",
        "prometheus": "Prometheus",
        "server": "a second server, on a port of its own",
    }
)
# Where a newcomer arrives, with a phone perhaps.
FIRST_PAGES: Final = (
    "README.md", "docs/quick-start.md", "docs/from-lmi.md", "docs/from-tgi.md",
    "docs/from-vllm-serve.md", "docs/deployment.md", "docs/kubernetes.md", "docs/listeners.md",
    "docs/adapter-store.md", "docs/custom-code.md", "docs/configuration.md", "docs/comparison.md",
    "config/operations.md", "config/samples/README.md", "config/sagemaker/README.md",
)  # fmt: skip
_MARK: Final = re.compile(r"<!-- (needs: (?P<needs>\w+)|(?P<note>figures vary|output varies)) -->")
_FENCE: Final = re.compile(r"^( *)```(.*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page; `line` is that of its fence."""

    page: str
    line: int
    language: str
    text: str
    needs: str = ""
    note: str = ""

    @property
    def is_run(self) -> bool:
        """Whether a test executes it."""
        return self.language in COMMANDS and not self.needs

    @property
    def name(self) -> str:
        """Where it is, for a test's name."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Step:
    """One command of a console block, and what is shown below it."""

    command: str
    shown: str


def pages() -> list[str]:
    """Return the path of every page of the site, below the repository's root."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from site_files import site_paths  # noqa: PLC0415
    finally:
        sys.path.pop(0)
    return [str(path.relative_to(ROOT)) for path in site_paths(ROOT) if is_markdown_file(str(path))]


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start, indent, language = 0, "", ""
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if not start:
            start, (indent, language) = number, fence.groups()
            continue
        mark = _MARK.search(lines[start - 2]) if start > 1 else None
        found = mark.groupdict("") if mark else {}
        text = "".join(f"{one.removeprefix(indent)}\n" for one in lines[start : number - 1])
        yield Block(page, start, language, text, **found)
        start = 0


def steps_of(block: Block) -> Iterator[Step]:
    """Yield the commands of a console block: `$` and a blank, to the end of its last quotes."""
    command, shown = "", ""
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if command:
                yield Step(command, shown)
            command, shown = line.removeprefix("$ "), ""
        elif not shown and _goes_on(command):
            command += f"\n{line}"
        else:
            shown += f"{line}\n"
    yield Step(command, shown)


def _goes_on(command: str) -> bool:
    """Whether a shell would read a further line: after a backslash, or inside of quotes."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False


def every_block() -> list[Block]:
    """Return the blocks of all pages."""
    return [block for page in pages() for block in blocks_of(page)]
