"""The linter of prose: what it finds in a page, with the line, and what it leaves alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documentation import ROOT

SCRIPT = ROOT / "scripts" / "lint_prose.py"
LONG = " ".join(["word"] * 29)
SHORT = " ".join(["word"] * 28)
TABLE = "| write | not |\n| --- | --- |\n| no one | nobody |\n"
GLOSSARY = f"# Words\n\n## Private words\n\n{TABLE}\n## Spellings\n\n{TABLE}"


def lint(*pages: Path) -> subprocess.CompletedProcess[str]:
    """Run the script on pages, or on all of the repository's."""
    command = [sys.executable, str(SCRIPT), *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Return where the test writes its page."""
    return tmp_path / "page.md"


def test_pages_of_the_repository_pass() -> None:
    """What `make lint` asks."""
    answer = lint()
    assert (answer.returncode, answer.stdout) == (0, ""), answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (f"# Page\n\nShort.\n{LONG}.\n", "page.md:3: a sentence of 29 words: word word"),
        (f"Short.\n\n- one\n- {LONG}\n", "page.md:4: a sentence of 29 words"),
        (f"| a | b |\n|---|---|\n| {LONG} | x |\n", "page.md:3: a cell of 29 words in 1 clauses"),
        ("```text\nx\n```\nThis ends\nfor nobody.\n", "page.md:4: 'nobody': write no one"),
        ("# For Whoever reads\n", "page.md:1: 'Whoever': write no one"),
        (
            f"| a |\n|---|\n| {SHORT}; {' '.join(['word'] * 15)} |\n",
            "page.md:3: a cell of 43 words in 2 clauses",
        ),
        ("| a |\n|---|\n| One. Two; three. Four |\n", "page.md:3: a cell of 4 words in 4 clauses"),
        ("A token costs 47 us there.\n", "page.md:1: '47 us': write µs"),
        ("[an end point](endpoint.md)\n", "page.md:1: 'end point': write endpoint"),
    ],
)
def test_finding_has_its_line(page: Path, text: str, finding: str) -> None:
    """One line for each, and exit code 1."""
    page.write_text(text)
    answer = lint(page)
    assert answer.returncode == 1
    assert len(answer.stdout.splitlines()) == 1
    assert finding in answer.stdout


@pytest.mark.parametrize(
    "text",
    [
        f"{SHORT}. {SHORT}: {SHORT}\n",
        f"{SHORT}\n\n{SHORT}\n- {SHORT}\n- {SHORT}\n",
        f"| {SHORT} |\n| One. Two; three |\n| lmi-vllm: error: One. Two; three; four |\n",
        f"```text\nnobody {LONG}\n```\n",
        "`nobody` and <!-- nobody\nnobody --> [this](nobody.md) by us, say us.\n",
        f"Short.\n\n## Arguments of vLLM 0.32\n\n{LONG} nobody\n",
    ],
)
def test_allowed_texts(page: Path, text: str) -> None:
    """Code, comments and addresses, texts of vLLM, and sentences within the bound."""
    page.write_text(text)
    answer = lint(page)
    assert (answer.returncode, answer.stdout) == (0, "")


def test_private_word_in_a_source(tmp_path: Path) -> None:
    """Comments and messages of the code; their sentences are not counted."""
    source = tmp_path / "source.py"
    source.write_text(f'"""{SHORT}."""\n\nX = "nobody {LONG}"\nY = 1  # Nobody reads it. {LONG}\n')
    answer = lint(source)
    assert answer.returncode == 1
    assert answer.stdout.splitlines() == [
        f"{source}:3: 'nobody': write no one, or the noun",
        f"{source}:4: 'Nobody': write no one, or the noun",
    ]


def test_long_sentence_in_a_docstring(tmp_path: Path) -> None:
    """Of a module, a class or a function; a tree of classes is no sentence."""
    source = tmp_path / "source.py"
    source.write_text(
        f'"""{LONG}.\n\n├── {LONG}\n"""\n\n'
        f'class One:\n    """{SHORT}. {SHORT}."""\n\n'
        f'    def two(self) -> None:\n        """Short.\n\n        {LONG}.\n        """\n'
    )
    answer = lint(source)
    assert answer.returncode == 1
    assert [line.partition(": word")[0] for line in answer.stdout.splitlines()] == [
        f"{source}:1: a sentence of 29 words",
        f"{source}:9: a sentence of 29 words",
    ]


def test_pages_beside_the_site_are_read(tmp_path: Path) -> None:
    """The changelog and the page of the tests keep the rules, too."""
    script = (ROOT / "scripts" / "lint_prose.py").read_text(encoding="utf-8")
    copy = tmp_path / "scripts" / "lint_prose.py"
    for name in ("docs/glossary.md", "tests/README.md", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{LONG}\n" if "glossary" not in name else GLOSSARY)
    copy.parent.mkdir()
    copy.write_text(script)
    (copy.parent / "site_files.py").write_text((ROOT / "scripts" / "site_files.py").read_text())
    answer = subprocess.run(
        [sys.executable, str(copy)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert [line.partition(": ")[0] for line in answer.stdout.splitlines()] == [
        "CHANGELOG.md:1",
        "tests/README.md:1",
    ]


def test_names_in_a_source(tmp_path: Path) -> None:
    """Private words inside names, and names of tests that are too long."""
    source = tmp_path / "source.py"
    source.write_text(
        f"def ask_nobody(): ...\ndef test_{'a' * 61}(): ...\ndef test_{'a' * 62}(): ...\n"
    )
    answer = lint(source)
    assert answer.stdout.splitlines() == [
        f"{source}:1: 'nobody': write no one, or the noun",
        f"{source}:3: a name of 67 characters: test_{'a' * 62}",
    ]
