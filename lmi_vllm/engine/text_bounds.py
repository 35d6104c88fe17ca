"""How much of a text is tokenized where only some of its tokens are kept.

A tokenizer reads a whole text before it cuts the tokens. It makes an object for each piece that it
cuts off: 8 MB, of which five tokens are kept, are over a million of them.
"""

from typing import Final

SPARE_TOKENS: Final = 64  # beside the cut a tokenizer may choose other tokens
LEAST_CHARACTERS: Final = 32 << 10  # these are always read: spaces may make no token at all


def kept_text(text: str, tokens: int, longest: int, side: str) -> str:
    """Return the part of a text that has its first `tokens`, or the last with `side` left.

    `longest` is the number of characters that one token stands for at most.
    """
    most = max((tokens + SPARE_TOKENS) * longest, LEAST_CHARACTERS)
    return text[-most:] if side == "left" else text[:most]
