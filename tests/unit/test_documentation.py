"""The documentation site builds without a warning; every command in it is run, or says why not."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tests.support.documentation import (
    COMMANDS,
    DATA,
    FIRST_PAGES,
    NEEDS,
    ROOT,
    Block,
    Step,
    blocks_of,
    every_block,
    pages,
    steps_of,
)

BLOCKS = every_block()
# What a line of data never begins with: it would be a command that no test runs.
PROGRAMS = r"\$ |lmi-vllm |curl |pip |python3? |make |docker |kubectl |systemctl |aws |sudo "
TROUBLES = ROOT / "docs" / "troubleshooting.md"


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every page is in the navigation, every link and anchor leads somewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    answer = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "WARNING" not in answer.stderr
    front = (tmp_path / "index.html").read_text()
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', front)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_block_declares_a_language_and_needs(block: Block) -> None:
    """A language, so that commands are known; a known need; no command in the guise of data."""
    assert block.language in (*COMMANDS, *DATA)
    assert block.needs in ("", *NEEDS)
    if block.language in DATA:
        assert not re.search(rf"^({PROGRAMS})", block.text, re.MULTILINE)
    if block.language == "console":
        assert block.text.startswith("$ ")
        assert all(step.command for step in steps_of(block))


@pytest.mark.parametrize("page", pages())
def test_commands_are_in_fenced_blocks(page: str) -> None:
    """Indented code would not be run."""
    outside = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    assert not re.findall(rf"^(?: {{4,}}|\t)(?:{PROGRAMS}).*$", outside, re.MULTILINE)


def test_commands_are_found() -> None:
    """The two tests above and the one that runs them see the pages and their blocks."""
    assert {"README.md", "docs/quick-start.md", "config/operations.md"} <= set(pages())
    assert sum(block.is_run for block in BLOCKS) > 30


def missing_tests(text: str) -> list[str]:
    """What `text` names as a test and the repository does not have."""
    named = re.findall(r"`((?:tests|integration)/[\w/]+\.py)`", text)
    return [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", pages())
def test_page_names_tests_that_exist(page: str) -> None:
    """A claim whose proof has moved takes the new path."""
    assert not missing_tests((ROOT / page).read_text(encoding="utf-8"))


def test_missing_tests_are_found() -> None:
    """The check can fail."""
    assert missing_tests("`tests/none.py`, `tests/breakages.py`") == ["tests/none.py"]


FRONT = {"README.md", "CHANGELOG.md"}  # a page to arrive at, and a list


@pytest.mark.parametrize("page", sorted({*pages()} - FRONT))
def test_page_opens_with_who_it_is_for(page: str) -> None:
    """One or two sentences: the reader, and what they can do afterwards."""
    opening = (ROOT / page).read_text(encoding="utf-8").split("\n\n")[1]
    assert opening.startswith("This page is for people who "), opening
    assert " After it you " in opening.replace("\n", " ")


def test_readme_is_short() -> None:
    """What is longer belongs into docs/."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


WORDS_OF_A_PAGE = 1500  # what a page of one task takes: about ten minutes
# Pages to look something up in, or to follow from top to bottom once.
REFERENCES = {
    "ARCHITECTURE.md", "CHANGELOG.md", "DECISIONS.md", "SECURITY.md", "config/models.md",
    "config/option-reference.md", "docs/http-api.md", "docs/memory.md", "docs/troubleshooting.md",
    "docs/vllm-routes.md",
}  # fmt: skip


@pytest.mark.parametrize(
    "page", [page for page in pages() if page not in REFERENCES and "/decisions/" not in page]
)
def test_page_has_one_task(page: str) -> None:
    """What is longer is two pages, or a reference."""
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= WORDS_OF_A_PAGE


MOST_COLUMNS = 4
README_WIDTH = 56  # characters of a phone's line, where words break at blanks


def tables_of(text: str) -> list[list[list[str]]]:
    """The cells of every table, without its rule, as they are shown."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose).replace("`", "")
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", f"{shown}\n", re.MULTILINE):
        rows = [
            re.split(r"(?<!\\)\|", row[1:].rstrip().removesuffix("|")) for row in table.splitlines()
        ]
        found.append([row for row in rows if not re.fullmatch(r"[\s:-]+", "".join(row))])
    return found


def width_of(table: list[list[str]]) -> int:
    """Characters that a table takes at least: the longest word of each column, and a margin."""
    words = (
        (word for cell in column for word in cell.split()) for column in zip(*table, strict=True)
    )
    return sum(2 + max(map(len, column), default=0) for column in words)


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_tables_of_first_pages_fit_a_phone(page: str) -> None:
    """A few columns, and in README short words; long lists are for the references."""
    tables = tables_of((ROOT / page).read_text(encoding="utf-8"))
    assert all(len(table[0]) <= MOST_COLUMNS for table in tables)
    if page == "README.md":
        assert tables
        assert max(map(width_of, tables)) <= README_WIDTH


def test_wide_tables_are_found() -> None:
    """The check can fail."""
    (table,) = tables_of("| a | b |\n|---|--:|\n| [word](docs/x.md) | `longer` of two |\n")
    assert table == [[" a ", " b "], [" word ", " longer of two "]]
    assert width_of(table) == 2 + 4 + 2 + 6


def long_curls(block: Block) -> list[str]:
    """Lines of curl commands that a narrow window wraps."""
    steps = steps_of(block) if block.language == "console" else [Step(block.text, "")]
    lines = [line for step in steps if "curl " in step.command for line in step.command.split("\n")]
    return [line for line in lines if len(line) > 80 and not line.startswith("#")]


@pytest.mark.parametrize("page", pages())
def test_curls_fit_80_columns(page: str) -> None:
    """What is copied can be read first."""
    blocks = [one for one in blocks_of(page) if one.language in ("console", "sh")]
    assert not [line for block in blocks for line in long_curls(block)]


def test_long_curls_are_found() -> None:
    """The check can fail, and sees both kinds of blocks."""
    long = f"curl -s localhost:8080/{'x' * 60}"
    assert long_curls(Block("p", 1, "sh", f"{long}\n")) == [long]
    assert long_curls(Block("p", 1, "console", f"$ {long}\n{{}}\n")) == [long]
    assert not long_curls(Block("p", 1, "console", f"$ curl x\n{'y' * 90}\n"))


@cache
def source_texts() -> tuple[str, ...]:
    """Every text of the package; what an f-string fills in is a NUL character."""
    found = []
    for path in (ROOT / "lmi_vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", None) for part in node.values)
                found.append("".join(p if isinstance(p, str) else "\0" for p in parts))
    return tuple(found)


def is_in_source(text: str) -> bool:
    """Whether some text of the package becomes `text`, where `...` stands for what is filled in."""
    parts = [re.escape(part.strip()) for part in text.split("...")]
    pattern = re.compile(r"[^\n]*?".join(parts))
    return any(pattern.search(one) for one in source_texts())


QUOTED = re.findall(r"^### `(.+)`$", TROUBLES.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("text", QUOTED)
def test_error_text_exists_in_the_source(text: str) -> None:
    """A heading of the troubleshooting page is a text that the source still has."""
    assert is_in_source(text)


def test_error_texts_are_found() -> None:
    """The check can fail, and there is something to check."""
    assert len(QUOTED) > 20
    assert not is_in_source("a text that no one ... ever wrote")


# A page and perhaps a heading of it, as comments of the code name them.
REFERENCE = re.compile(r"\b((?:docs|config)/[\w/-]+\.md)(?:#([\w-]+))?")
CODE = ("lmi_vllm", "tests", "integration", "scripts")


def dangling(text: str) -> list[str]:
    """What `text` refers to and the site does not have."""
    return [
        found[0]
        for found in REFERENCE.finditer(text)
        if not (ROOT / found[1]).exists() or (found[2] and found[2] not in anchors(found[1]))
    ]


@cache
def anchors(page: str) -> frozenset[str]:
    """The anchors of a page's headings."""
    prose = re.sub(
        r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S
    )
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return frozenset(slugify(heading.replace("`", ""), "-") for heading in headings)


@pytest.mark.parametrize("folder", CODE)
def test_code_refers_to_headings_that_exist(folder: str) -> None:
    """A comment that names a page, or a heading of it, names one that exists."""
    for path in (ROOT / folder).rglob("*.py"):
        if path != Path(__file__):
            assert not dangling(path.read_text(encoding="utf-8")), path


def test_dangling_references_are_found() -> None:
    """The check can fail."""
    good = "docs/answers.md#finish-reasons, config/quantization.md"
    assert dangling(f"{good}, docs/requests.md#nothing, docs/none.md") == [
        "docs/requests.md#nothing",
        "docs/none.md",
    ]


ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def named_paths(text: str) -> list[tuple[str, str]]:
    """Every path in backticks, with the room of the table row in which it stands."""
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        rooms = re.findall(r"`([\w/]+/)`", cells[1]) if len(cells) > 1 else []
        for path in re.findall(r"`(\w[\w./-]*(?:/|\.py|\.toml|\.md))[`: ]", line):
            found.append((path, rooms[0] if rooms else ""))
    return found


def is_there(path: str, room: str) -> bool:
    """Whether the repository, the package or that room has the path."""
    return any((ROOT / top / path).exists() for top in ("", "lmi_vllm", f"lmi_vllm/{room}"))


@pytest.mark.parametrize(("path", "room"), sorted(set(named_paths(ARCHITECTURE))))
def test_path_of_the_architecture_page_exists(path: str, room: str) -> None:
    """What moves takes its mention along."""
    assert is_there(path, room)


def test_architecture_page_names_every_room_and_extra() -> None:
    """No folder of the package goes unsaid, and the check above sees them."""
    paths = {path for path, _ in named_paths(ARCHITECTURE)}
    folders = {p.parent for p in (ROOT / "lmi_vllm").glob("*/__init__.py")}
    assert {f"{folder.name}/" for folder in folders} <= paths
    features = {p.parent.name for p in (ROOT / "lmi_vllm/features").glob("*/__init__.py")}
    listed = ARCHITECTURE.split("## Features")[1].split("## ")[0]
    assert {name for name in re.findall(r"`(\w+)`", listed) if name in features} == features
    assert len(paths) > 30
    assert not is_there("gone.py", "config/")
