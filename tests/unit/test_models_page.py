"""config/models.md is what the results in config/models/ say."""

import json
from pathlib import Path

import pytest

from integration.matrix.page import PAGE, page

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
