"""Hold the pages to our rules of prose: short sentences, and the glossary's words and spellings.

    python scripts/lint_prose.py [FILE ...]

Prints one line for each finding and exits with 1 if there is one. What a page must not say stands
in docs/glossary.md, in the column *not* of the table of spellings; a number there is any number.
Code, links' addresses and HTML comments are not read. In the sources, comments and
messages included, only `nobody` and its like are findings. vale would do this, but its packages on
PyPI and npm only download it from elsewhere.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from site_files import site_paths

ROOT: Final = Path(__file__).resolve().parent.parent
GLOSSARY: Final = ROOT / "docs" / "glossary.md"
WORDS_AT_MOST: Final = 30
# Pages that are not read, and the heading from which on others are not: texts of other projects.
UNREAD: Final = ("CHANGELOG.md",)
FOREIGN: Final = "## Arguments of vLLM"
SOURCES: Final = ("lmi_vllm/**/*.py", "lmi_vllm/**/*.js", "lmi_vllm/**/*.html", "scripts/**/*.py")
PERSONS: Final = re.compile(r"\b(?:no|any|some|every)body\b|\bwhoever\b", re.IGNORECASE)

_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE: Final = re.compile(r"`[^`]*`")
_ADDRESS: Final = re.compile(r"\]\([^)\s]*\)|\]\[\w+\]|<[^>]*>|https?://\S+")
_ITEM: Final = re.compile(r"\s*(?:[-*]|\d+\.) ")
_SENTENCE_END: Final = re.compile(r"(?<=[.?!:])[\])*\"]*\s+| · ")
_WORD: Final = re.compile(r"[\w'/-]*[^\W\d_][\w'/-]*")  # numbers are none


@dataclass(frozen=True)
class Passage:
    """A paragraph, a list item, a heading or a cell of a table; `line` is where it begins."""

    line: int
    text: str


@dataclass(frozen=True)
class Spelling:
    """What to write, and what not: one row of the glossary."""

    good: str
    bad: re.Pattern[str]


def spellings(glossary: str) -> list[Spelling]:
    """Return the rows of the table under *Spellings*."""
    rows = glossary.partition("\n## Spellings\n")[2].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row[:1] == "|"]
    return [Spelling(good, _any_of(bad.split(", "))) for good, bad in cells[2:]]


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return what finds each of the words where it stands alone."""
    texts = (re.sub(r"\d+", lambda _: r"\d[\d.,]*", re.escape(word)) for word in words)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(texts)})(?![\w/-])")


def passages(page: str) -> Iterator[Passage]:
    """Yield what is prose in a page, without its markup."""
    begun, lines = 0, list[str]()
    for number, line in enumerate([*_readable(page), ""], 1):
        alone = line.startswith(("|", "#"))
        if lines and (not line.strip() or alone or _ITEM.match(line)):
            yield Passage(begun, _plain(" ".join(lines)))
            lines = []
        if alone:
            cells = _plain(line).replace(";", ".").split("|")  # `;` ends a sentence of a table
            yield from (Passage(number, cell) for cell in cells if cell.strip())
        elif line.strip():
            begun = begun if lines else number
            lines.append(line.strip())


def _readable(page: str) -> Iterator[str]:
    """Yield every line, empty where it is code, a comment or a text of others."""
    page = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), page)
    fenced = False
    for line in page.partition(f"\n{FOREIGN}")[0].splitlines():
        fence = line.lstrip().startswith("```")
        yield "" if fenced or fence else line
        fenced ^= fence


def _plain(text: str) -> str:
    """Return the text with `X` for code and without addresses."""
    return _ADDRESS.sub("]", _CODE.sub("X", text))


def findings(page: str, rules: Iterable[Spelling]) -> Iterator[tuple[int, str]]:
    """Yield the line and what is wrong there."""
    rules = tuple(rules)
    for passage in passages(page):
        for sentence in _SENTENCE_END.split(passage.text):
            count = len(_WORD.findall(sentence))
            if count > WORDS_AT_MOST:
                yield passage.line, f"a sentence of {count} words: {sentence[:60]}..."
        for rule in rules:
            if found := rule.bad.search(passage.text):
                yield passage.line, f"{found[0]!r}: write {rule.good}"


def source_findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a source that name a person without a noun."""
    for number, line in enumerate(source.splitlines(), 1):
        if found := PERSONS.search(line):
            yield number, f"{found[0]!r}: write the noun"


def main(names: list[str]) -> int:
    """Print the findings of the files, or of all pages and sources; return the exit code."""
    rules = spellings(GLOSSARY.read_text(encoding="utf-8"))
    pages = [path for path in site_paths(ROOT) if path.suffix == ".md"]
    sources = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    count = 0
    for path in [Path(name).resolve() for name in names] or [*pages, *sources]:
        name = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
        if name in UNREAD or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        text = text.partition("\n## Spellings\n")[0] if path == GLOSSARY else text
        found = findings(text, rules) if path.suffix == ".md" else source_findings(text)
        for line, finding in found:
            print(f"{name}:{line}: {finding}")
            count += 1
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
