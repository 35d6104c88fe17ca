"""Value parsers with a grammar of their own."""

import pytest

from lmi_vllm.config import parsers as text_parsers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", (5, 60)),
        ("5/PT1M", (5, 60)),
        ("3/pt30s", (3, 30)),
        ("3/PT0.5S", (3, 0.5)),
        ("1/P1D", (1, 86400)),
        ("2/P1DT2H3M4S", (2, 93784)),
        ("4/90", (4, 90)),
    ],
)
def test_error_rate(text: str, expected: tuple[int, float]) -> None:
    """A number of errors and a time; a minute where none is given."""
    assert text_parsers.error_rate(text) == expected


@pytest.mark.parametrize(
    "text", ["", "x", "0/PT1M", "5/", "5/PT", "5/P", "5/0", "5/1M", "-1", "5/PT1M1"]
)
def test_error_rate_refuses(text: str) -> None:
    """What is no number, no time, or nothing at all."""
    with pytest.raises(ValueError, match="such as 5/PT1M"):
        text_parsers.error_rate(text)
