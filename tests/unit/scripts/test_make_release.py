"""A release takes the unreleased entries of the changelog, and states its version."""

import datetime
from pathlib import Path

import pytest

from scripts.make_release import VERSION_FILE, cut, read_version, with_release
from tests.support.documentation import ROOT

DAY = datetime.date(2027, 1, 2)
OLD = "\n## [0.1.0] - 2026-11-22\n\n- Old.\n"
BEFORE = f"# Changelog\n\n## [Unreleased]\n\n### Added\n- One thing.\n{OLD}"
AFTER = (
    f"# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-02\n\n### Added\n- One thing.\n{OLD}"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a version and a changelog."""
    (tmp_path / VERSION_FILE).parent.mkdir()
    (tmp_path / VERSION_FILE).write_text('"""Version."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(BEFORE)
    return tmp_path


def test_release_takes_the_unreleased_entries(root: Path) -> None:
    """They stand below version and date, an empty [Unreleased] above; the version is stated."""
    cut(root, "0.2.0", DAY)
    assert (root / "CHANGELOG.md").read_text() == AFTER
    assert read_version(root) == "0.2.0"


def test_first_release_needs_no_earlier_one() -> None:
    """The entries may be the end of the file."""
    text = with_release("# Changelog\n\n## [Unreleased]\n- One.\n", "0.1.0", DAY)
    assert text.endswith("## [Unreleased]\n\n## [0.1.0] - 2027-01-02\n\n- One.\n")


def test_stated_version_with_a_heading_is_built_again(root: Path) -> None:
    """Nothing is written: what is unreleased is for the next version."""
    cut(root, "0.1.0", DAY)
    assert (root / "CHANGELOG.md").read_text() == BEFORE


@pytest.mark.parametrize(
    ("changelog", "version", "message"),
    [
        (AFTER, "0.3.0", "no entry below"),
        ("# Changelog\n", "0.2.0", "no heading"),
        (BEFORE, "next", "is no version"),
        (AFTER, "0.2.0", "already"),
    ],
    ids=["empty", "no heading", "no version", "an earlier version"],
)
def test_release_is_refused_and_nothing_is_written(
    root: Path, changelog: str, version: str, message: str
) -> None:
    """Why a release cannot be cut is said."""
    (root / "CHANGELOG.md").write_text(changelog)
    with pytest.raises(ValueError, match=message):
        cut(root, version, DAY)
    assert (root / "CHANGELOG.md").read_text() == changelog
    assert read_version(root) == "0.1.0"


def test_changelog_names_the_stated_version_first() -> None:
    """[Unreleased] comes first, then the version of the package."""
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    ]
    assert headings[0] == "## [Unreleased]"
    assert headings[1].startswith(f"## [{read_version(ROOT)}] - ")
