"""Every decision is a complete record in the index, and every reference names one."""

import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tests.support.documentation import ROOT

PAGES = sorted((ROOT / "docs" / "decisions").glob("*.md"))
INDEX_NAME = "DECISIONS.md"
INDEX = (ROOT / INDEX_NAME).read_text(encoding="utf-8")
PARTS = ("Context", "Decision", "Consequences", "Status")
REFERENCE = re.compile(r"DECISIONS(?:\.md)? (\d+(?:, \d+)*)")
FILE = re.compile(r"`((?:\w+/)+[\w.-]+\.(?:py|md|json|toml))`")


def records() -> dict[int, tuple[Path, str, str]]:
    """Return each record by its number: its page, heading and text."""
    found: dict[int, tuple[Path, str, str]] = {}
    for page in PAGES:
        for text in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            heading, _, body = text.partition("\n")
            number = int(heading.split(".")[0])
            assert number not in found, f"two records have the number {number}"
            found[number] = (page, heading, body)
    return found


RECORDS = records()
REPLACED = {
    int(old): int(new) for old, new in re.findall(r"^\| (\d+) \| .* (\d+) \|$", INDEX, re.M)
}


def unknown(text: str) -> list[int]:
    """Return the numbers that `text` refers to and that lead to no record."""
    numbers = {int(n) for found in REFERENCE.findall(text) for n in found.split(", ")}
    return sorted(numbers - RECORDS.keys() - REPLACED.keys())


def texts_of_the_repository() -> list[Path]:
    """Return the code and the pages."""
    folders = ("lmi_vllm", "tests", "integration", "scripts", "docs", "config")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [p for p in (*ROOT.glob("*.md"), *inside) if p.suffix in (".py", ".md") and p.is_file()]


def test_reference_names_a_record() -> None:
    """Comments, tests and pages refer to decisions that exist."""
    texts = [path.read_text(encoding="utf-8") for path in texts_of_the_repository()]
    assert sum(len(REFERENCE.findall(text)) for text in texts) > 5
    assert not [number for text in texts for number in unknown(text)]


def test_unknown_reference_is_found() -> None:
    """The check can fail."""
    assert unknown(f"see {INDEX_NAME} 42, 9999 and {INDEX_NAME} 6") == [9999]


@pytest.mark.parametrize("number", RECORDS)
def test_record_is_complete(number: int) -> None:
    """It has its four parts in order and no others, and the index leads to its heading."""
    page, heading, body = RECORDS[number]
    assert tuple(re.findall(r"^- \*\*([^:*]+):\*\* ", body, re.MULTILINE)) == PARTS
    anchor = slugify(heading.replace("`", ""), "-")
    assert f"- [{heading}]({page.relative_to(ROOT)}#{anchor})\n" in INDEX


@pytest.mark.parametrize("number", RECORDS)
def test_record_names_files_that_exist(number: int) -> None:
    """What moves takes its mention along; paths begin at the repository or the package."""
    named = FILE.findall(RECORDS[number][2])
    assert [n for n in named if not ((ROOT / n).exists() or (ROOT / "lmi_vllm" / n).exists())] == []


@pytest.mark.parametrize(("old", "new"), REPLACED.items())
def test_replaced_number_leads_to_the_record_that_says_so(old: int, new: int) -> None:
    """A number is used once, and its successor's status names it."""
    assert old not in RECORDS
    assert re.search(rf"\b{old} \(", RECORDS[new][2].partition("**Status:**")[2])


def test_index_lists_nothing_else() -> None:
    """A record that was removed leaves the index, too."""
    listed = {int(number) for number in re.findall(r"^- \[(\d+)\.", INDEX, re.M)}
    assert listed == RECORDS.keys()
