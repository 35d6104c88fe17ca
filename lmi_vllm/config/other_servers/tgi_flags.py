"""The command line of TGI's launcher: each of its flags is a variable, in upper case."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.other_servers.tgi_variables import TGI_PAIRS, TGI_VARIABLES

LAUNCHER: Final = "text-generation-launcher"
_SHORT: Final = MappingProxyType({"-p": "PORT", "-e": "ENV"})


def variables_of(flags: Sequence[str]) -> dict[str, str]:
    """Return TGI's variables; a flag without a value is `true`."""
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


def unknown_flags(variables: Sequence[str]) -> list[str]:
    """Return those of these names that the launcher does not have, as they are written."""
    unknown = [name for name in variables if name not in (*TGI_VARIABLES, *TGI_PAIRS)]
    return [f"--{name.lower().replace('_', '-')}" for name in unknown]
