"""Names of variables: their prefixes, their keys, and similar names for a typo."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Final

from lmi_vllm.config.setting import FILE_PREFIX

OPTION_PREFIX: Final = "OPTION_"
SERVING_PREFIX: Final = "SERVING_"
ARGUMENT_PREFIX: Final = "ARGS_"
OWN_PREFIX: Final = "LMI_"
SAGEMAKER_PREFIX: Final = "SM_VLLM_"  # of vLLM's images for SageMaker
PREFIXES: Final = (OPTION_PREFIX, SERVING_PREFIX, OWN_PREFIX)

_SUGGESTIONS: Final = 3
_CUTOFF: Final = 0.72  # of difflib's similarity: most typos are above, other words below
_LONGEST_SUGGESTED: Final = 200  # characters; a longer name is not compared


# What each of these holds is read here or by vLLM, by its name.
_READ: Final = (*PREFIXES, SAGEMAKER_PREFIX, "HF_", "VLLM_")
_MODEL_OF_TGI: Final = "MODEL_ID"


def quoted(environ: Mapping[str, str]) -> list[str]:
    """Return the variables with quotes around their values, as `docker --env-file` passes them.

    A shell takes them off. Text that has the same quotes inside is left to who reads it.
    """
    return [
        name
        for name, text in environ.items()
        if (name.startswith(_READ) or name == _MODEL_OF_TGI)
        and len(text) > 1
        and text[0] in "'\""
        and text.find(text[0], 1) == len(text) - 1
    ]


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
    """At most three names that are similar to `name`, as a clause for a message.

    Prefixes do not count: all names of a kind share one. A wrong name would be worse than none.
    """
    names = list(dict.fromkeys(known))
    by_bare = {bare_name(known_name): known_name for known_name in names}
    near: list[str] = []
    if len(name) <= _LONGEST_SUGGESTED:
        near = difflib.get_close_matches(bare_name(name), by_bare, n=_SUGGESTIONS, cutoff=_CUTOFF)
    if not near:
        return f"none of the {len(names)} names is similar, see `lmi-vllm explain`"
    return "closest names: " + ", ".join(by_bare[bare] for bare in near)


def bare_name(name: str) -> str:
    """`name` in lower case, without a prefix."""
    folded = name.lower()
    prefixes = (FILE_PREFIX, *(prefix.lower() for prefix in (*PREFIXES, ARGUMENT_PREFIX)))
    found = next((prefix for prefix in prefixes if folded.startswith(prefix)), "")
    return folded.removeprefix(found)
