"""config/models.md is what the results in config/models/ say."""

from integration.matrix.page import PAGE, page


def test_models_page_is_not_stale() -> None:
    """The page was written from the results beside it."""
    assert PAGE.read_text(encoding="utf-8") == page()
