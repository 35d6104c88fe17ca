"""config/models.md is what the results in config/models/ say."""

import json
from pathlib import Path

import pytest

from integration.matrix.page import PAGE, TODAY, page

ADAPTERS = sorted((Path(__file__).parents[2] / "config/models/adapters").glob("*.json"))


def test_models_page_is_not_stale() -> None:
    """The page was written from the results beside it."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("file", ADAPTERS, ids=lambda file: file.stem)
def test_no_adapter_answers_wrongly(file: Path) -> None:
    """The page says so of every architecture that was compared with merged weights."""
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["wrong"] == {}
    assert found["works"] or found["refused"] or found["error"]


def test_the_page_begins_with_what_is_asked_for_today() -> None:
    """Every family of the list is there, and the first row is the first of them."""
    rows = [line for line in page().split("## Works")[1].splitlines() if line.startswith("| ")]
    titles = [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]]
    for name in TODAY:
        assert any(title.startswith(name) for title in titles), name
    assert titles[0].startswith(TODAY[0])
    assert "48 of 48" in rows[2]
