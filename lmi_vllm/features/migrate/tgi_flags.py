"""The flags of text-generation-launcher, as the variables that mean the same."""

from collections.abc import Sequence
from typing import Final

LAUNCHER: Final = "text-generation-launcher"
_SHORT: Final = {"-p": "PORT", "-e": "ENV"}


def variables_of(flags: Sequence[str]) -> dict[str, str]:
    """Return TGI's variables: each flag is one in upper case; without a value it is `true`."""
    found: dict[str, str] = {}
    name = ""
    for word in flags:
        if word == LAUNCHER:
            continue
        if word.startswith("--") or word in _SHORT:
            flag, has_value, value = word.removeprefix("--").partition("=")
            name = _SHORT.get(word) or flag.upper().replace("-", "_")
            found[name] = value if has_value else "true"
            name = "" if has_value else name
        elif name:
            found[name], name = word, ""
        else:
            found[word] = ""  # no flag before it
    return found
