"""Only as much of a text is tokenized as the tokens that are kept can come from."""

import pytest

from lmi_vllm.engine.text_bounds import LEAST_CHARACTERS, SPARE_TOKENS, kept_text


@pytest.mark.parametrize("side", ["left", "right"])
def test_kept_text_is_the_end_that_the_tokens_are_from(side: str) -> None:
    """So many characters as they and some more may have, and never few."""
    text = "".join(chr(0x4E00 + number % 5000) for number in range(200_000))
    for tokens, longest in ((5, 16), (5000, 16), (1, 1), (9, 10_000)):
        most = max((tokens + SPARE_TOKENS) * longest, LEAST_CHARACTERS)
        kept = kept_text(text, tokens, longest, side)
        assert kept == (text[:most] if side == "right" else text[-most:])
    assert kept_text("short", 1, 1, side) == "short"
