"""Check the pages by our rules of prose: short sentences and cells, the glossary's words.

    python scripts/lint_prose.py [FILE ...]

Prints one line for each finding and exits with 1 if there is one. What a page must not say is in
docs/glossary.md, in the column *not* of the tables of private words and of spellings; there a
number is any number. Code, links' addresses and HTML comments are not read. Findings in sources
are private words (in names, comments and messages, too, but not as a whole literal), long
sentences of docstrings, and long names of tests.
vale would do this, but its packages on PyPI and npm only download it from elsewhere.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from site_files import site_paths

ROOT: Final = Path(__file__).resolve().parent.parent
GLOSSARY: Final = ROOT / "docs" / "glossary.md"
WORDS_AT_MOST: Final = 28  # of a sentence
CELL_WORDS_AT_MOST: Final = 28  # more than a cell holds belongs into a paragraph
CELL_CLAUSES_AT_MOST: Final = 3  # sentences, or parts of one between semicolons
NAME_AT_MOST: Final = 66  # characters of a test's name
FOREIGN: Final = "## Arguments of vLLM"  # from here on a page has texts of another project
BESIDE_THE_SITE: Final = ("tests/README.md", "integration/gpu/README.md")  # pages, too
SOURCES: Final = (
    "lmi_vllm/**/*.py", "lmi_vllm/**/*.js", "lmi_vllm/**/*.html", "scripts/**/*.py",
    "integration/**/*.py", "tests/**/*.py", "Makefile",
)  # fmt: skip
QUOTED: Final = " lmi-vllm: error:"  # a cell with a message of the server
PRIVATE: Final = "Private words"  # a table of the glossary, and so is *Spellings*
OWN_TEST: Final = "tests/unit/scripts/test_lint_prose.py"

_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE: Final = re.compile(r"`[^`]*`")
_ADDRESS: Final = re.compile(r"\]\([^)\s]*\)|\]\[\w+\]|<[^>]*>|https?://\S+")
_LITERAL: Final = re.compile(r'(?<!")"[\w-]+"(?!")')
_ITEM: Final = re.compile(r"\s*(?:[-*]|\d+\.) ")
_SENTENCE_END: Final = re.compile(r"(?<=[.?!:])[\])*\"]*\s+| · ")
_CLAUSE_END: Final = re.compile(r"[;.?!](?:\s|$)")
_NAME: Final = re.compile(r"\b(?:def|class) (\w+)")
_TREE: Final = re.compile(r"^.*[│├└].*$", re.MULTILINE)  # of classes, in a docstring
_WORD: Final = re.compile(r"[\w'/-]*[^\W\d_][\w'/-]*")  # numbers are none


@dataclass(frozen=True)
class Passage:
    """A paragraph, a list item, a heading or a cell of a table; `line` is where it begins."""

    line: int
    text: str
    is_cell: bool = False


@dataclass(frozen=True)
class Spelling:
    """What to write, and what not: one row of the glossary."""

    good: str
    bad: re.Pattern[str]


def spellings(glossary: str, heading: str) -> list[Spelling]:
    """Return the rows of the table under this heading."""
    rows = glossary.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row[:1] == "|"]
    flags = re.IGNORECASE if heading == PRIVATE else re.NOFLAG
    return [Spelling(good, _any_of(bad.split(", "), flags)) for good, bad in cells[2:]]


def _any_of(words: Iterable[str], flags: re.RegexFlag) -> re.Pattern[str]:
    """Return what finds each of the words where it stands alone."""
    texts = (re.sub(r"\d+", lambda _: r"\d[\d.,]*", re.escape(word)) for word in words)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(texts)})(?![\w/-])", flags)


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
            is_row = line.startswith("|")
            yield from (Passage(number, cell, is_row) for cell in cells if cell.strip())
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
        count = len(_WORD.findall(passage.text))
        if passage.is_cell and not passage.text.startswith(QUOTED):
            clauses = len([part for part in _CLAUSE_END.split(passage.text) if part.strip()])
            if count > CELL_WORDS_AT_MOST or clauses > CELL_CLAUSES_AT_MOST:
                said = f"{count} words in {clauses} clauses"
                yield passage.line, f"a cell of {said}: {passage.text.strip()[:60]}..."
        for sentence in [] if passage.is_cell else _SENTENCE_END.split(passage.text):
            count = len(_WORD.findall(sentence))
            if count > WORDS_AT_MOST:
                yield passage.line, f"a sentence of {count} words: {sentence[:60]}..."
        for rule in rules:
            if found := rule.bad.search(passage.text):
                yield passage.line, f"{found[0]!r}: write {rule.good}"


def source_findings(source: str, rules: Iterable[Spelling]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a source with private words."""
    rules = tuple(rules)
    for number, line in enumerate(_LITERAL.sub("X", source).splitlines(), 1):
        name = defined[1] if (defined := _NAME.search(line)) else ""
        if name.startswith("test_") and len(name) > NAME_AT_MOST:
            yield number, f"a name of {len(name)} characters: {name}"
        for rule in rules:
            if found := rule.bad.search(f"{line} {name.replace('_', ' ')}"):
                yield number, f"{found[0]!r}: write {rule.good}"


def docstring_findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each docstring with a sentence that is too long, and the sentence."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = _TREE.sub("", ast.get_docstring(node) or "")
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in _SENTENCE_END.split(_plain(" ".join(paragraph.split()))):
                count = len(_WORD.findall(sentence))
                if count > WORDS_AT_MOST:
                    line = getattr(node, "lineno", 1)
                    yield line, f"a sentence of {count} words: {sentence[:60]}..."


def main(names: list[str]) -> int:
    """Print the findings of the files, or of all pages and sources; return the exit code."""
    glossary = GLOSSARY.read_text(encoding="utf-8")
    private = spellings(glossary, PRIVATE)
    rules = [*private, *spellings(glossary, "Spellings")]
    pages = [path for path in site_paths(ROOT) if path.suffix == ".md"]
    pages += [ROOT / name for name in BESIDE_THE_SITE]
    sources = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    count = 0
    for path in [Path(name).resolve() for name in names] or [*pages, *sources]:
        name = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
        if name == OWN_TEST or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        text = text.partition(f"\n## {PRIVATE}\n")[0] if path == GLOSSARY else text
        results = findings(text, rules) if path.suffix == ".md" else source_findings(text, private)
        docstrings = docstring_findings(text) if path.suffix == ".py" else ()
        for line, finding in sorted([*results, *docstrings]):
            print(f"{name}:{line}: {finding}")
            count += 1
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
