"""Names of variables: their prefixes, their keys, and similar names for a typo."""

import difflib
import re
from collections.abc import Iterable
from typing import Final

from lmi_vllm.config.setting import FILE_PREFIX

OPTION_PREFIX: Final = "OPTION_"
SERVING_PREFIX: Final = "SERVING_"
ARGUMENT_PREFIX: Final = "ARGS_"
OWN_PREFIX: Final = "LMI_"
PREFIXES: Final = (OPTION_PREFIX, SERVING_PREFIX, OWN_PREFIX)

_SUGGESTIONS: Final = 3
_CUTOFFS: Final = (0.7, 0.5, 0.0)
_LONGEST_SUGGESTED: Final = 200  # characters; a longer name is not compared


def option_key(variable: str) -> str:
    """The key of an `OPTION_*` variable."""
    suffix = variable.removeprefix(OPTION_PREFIX)
    if suffix == "ENGINE":
        return "engine"
    if suffix == "ENTRYPOINT":
        return f"{FILE_PREFIX}entryPoint"
    if re.fullmatch(r"[A-Z0-9_]+", suffix):
        suffix = suffix.lower()
    return f"{FILE_PREFIX}{suffix}"


def closest(name: str, known: Iterable[str]) -> str:
    """The three names most similar to `name`, as a clause for a message."""
    names = list(dict.fromkeys(known))
    if len(name) > _LONGEST_SUGGESTED:
        return f"there are {len(names)} names, see `lmi-vllm explain`"
    by_folded = {known_name.lower(): known_name for known_name in names}
    near: list[str] = []
    for cutoff in _CUTOFFS:  # a higher cutoff is faster, and finds most typos
        near = difflib.get_close_matches(name.lower(), by_folded, n=_SUGGESTIONS, cutoff=cutoff)
        if len(near) == _SUGGESTIONS:
            break
    return "closest names: " + ", ".join(by_folded[folded] for folded in near)
