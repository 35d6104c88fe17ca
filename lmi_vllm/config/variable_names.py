"""Names of variables: their keys, those that Kubernetes sets, and similar names for a typo."""

import difflib
import re
from collections.abc import Iterable
from typing import Final

from lmi_vllm.config.options import ALIAS_VARIABLES, all_rows
from lmi_vllm.config.options.row import ENV, FILE, Option
from lmi_vllm.config.setting import FILE_PREFIX
from lmi_vllm.config.vllm_schema import load_release

OPTION_PREFIX: Final = "OPTION_"
SERVING_PREFIX: Final = "SERVING_"
ARGUMENT_PREFIX: Final = "ARGS_"
OWN_PREFIX: Final = "LMI_"
PREFIXES: Final = (OPTION_PREFIX, SERVING_PREFIX, OWN_PREFIX)

_SUGGESTIONS: Final = 3
_CUTOFFS: Final = (0.7, 0.5, 0.0)
_LONGEST_SUGGESTED: Final = 200  # characters; a longer name is not compared
_KUBERNETES: Final = re.compile(
    r"(SERVING|LMI|OPTION)(_[A-Z0-9_]+)?"
    r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_KUBERNETES_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")


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


def argument_key(variable: str) -> str:
    """The key, without a prefix, of an `ARGS_*` variable: an argument of LMI's translators."""
    suffix = variable.removeprefix(ARGUMENT_PREFIX).lower()
    return next((row.name for row in all_rows().server if row.name.lower() == suffix), suffix)


def is_kubernetes_made(variable: str, text: str) -> bool:
    """Whether Kubernetes set `variable` for a Service whose name begins like our prefix."""
    if _KUBERNETES_VALUE.match(text):
        return _KUBERNETES.fullmatch(variable) is not None
    if variable.startswith(OPTION_PREFIX) and is_known_option(option_key(variable)[7:]):
        return False  # OPTION_MASTER_PORT is an engine argument
    return _KUBERNETES.fullmatch(variable) is not None


def find_option(name: str) -> Option | None:
    """The row of option `name` (without prefix), by either of its names."""
    return next(
        (row for row in all_rows().options if name == row.name or name in row.aliases), None
    )


def is_known_option(name: str) -> bool:
    """Whether `name` is in the table or is an argument of vLLM."""
    release = load_release()
    return find_option(name) is not None or name in release.passed or name in release.front_end


def option_names() -> tuple[str, ...]:
    """Every name that may follow `option.`."""
    release = load_release()
    table = [name for row in all_rows().options for name in (row.name, *row.aliases)]
    server = [alias.removeprefix(FILE_PREFIX) for row in all_rows().server for alias in row.aliases]
    return tuple(dict.fromkeys([*table, *server, *release.passed, *release.front_end]))


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


def file_suggestions(key: str) -> str:
    """A clause with similar names for an unknown key of serving.properties."""
    if key.lower().startswith(FILE_PREFIX):
        names = [f"{FILE_PREFIX}{name}" for name in option_names()]
        names += [row.name for row in all_rows().server if row.written]
        return closest(key, names)
    if is_known_option(key):
        return f"write {FILE_PREFIX}{key}"
    names = [row.name for row in all_rows().server if FILE in row.written]
    return closest(key, [*names, *(f"{FILE_PREFIX}{name}" for name in option_names())])


def variable_suggestions(variable: str, known: Iterable[str] = ()) -> str:
    """A clause with similar names for an unknown `OPTION_*`, `SERVING_*` or `known` variable."""
    if variable.startswith(OPTION_PREFIX):
        names = [OPTION_PREFIX + _suffix(name) for name in option_names()]
        names += [SERVING_PREFIX + row.name.upper() for row in all_rows().server if row.written]
    elif variable.startswith(ARGUMENT_PREFIX):
        rows = (row for row in all_rows().server if row.written == (FILE,))
        names = [ARGUMENT_PREFIX + row.name.upper() for row in rows]
    elif variable.startswith(SERVING_PREFIX):
        names = [f"{SERVING_PREFIX}{row.name.upper()}" for row in serving_rows()]
    else:
        names = [name for name in known if name.startswith(OWN_PREFIX)]
    same = next((name for name in names if name.lower() == variable.lower()), None)
    return f"write {same}" if same else closest(variable, names)


def _suffix(name: str) -> str:
    """The part after `OPTION_` for option `name`, in upper case if that is read as the same."""
    return name if name != name.lower() and name != "entryPoint" else name.upper()


def serving_rows() -> tuple[Option, ...]:
    """The server settings that can be written `SERVING_<NAME>`."""
    return tuple(row for row in all_rows().server if ENV in row.written)


def case_hint(variable: str, variables: Iterable[str]) -> str | None:
    """The right name of a variable in the wrong case; `variables` are the environment variables."""
    upper = variable.upper()
    if variable == upper or not upper.startswith(PREFIXES):
        return None
    if variable.startswith(PREFIXES):
        return None  # the prefix is right, so the name itself is wrong
    known = {*variables, *(row.source for row in ALIAS_VARIABLES)}
    known |= {f"{SERVING_PREFIX}{row.name.upper()}" for row in serving_rows()}
    known |= {OPTION_PREFIX + _suffix(name).upper() for name in option_names()}
    return upper if upper in known else None
