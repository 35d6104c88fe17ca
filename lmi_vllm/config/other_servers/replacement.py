"""What one setting of another server is here."""

from collections.abc import Callable
from dataclasses import dataclass

from lmi_vllm.messages import OriginKind


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a value becomes: `key` None means there is nothing to set."""

    key: str | None
    text: str = ""
    why: str = ""  # set where it is only an approximation, or where it is refused
    is_refused: bool = False
    kind: OriginKind = OriginKind.FILE  # of the place where it is to be written


Converter = Callable[[str], Replacement]


def same_value(key: str, why: str = "") -> Converter:
    """Return a converter that sets `key` to the same text."""
    return lambda text: Replacement(key, text, why)


def variable(name: str, text: str, why: str = "") -> Replacement:
    """Return the replacement by an environment variable."""
    return Replacement(name, text, why, kind=OriginKind.VARIABLE)


def same_in_variable(name: str, why: str = "") -> Converter:
    """Return a converter that sets the variable `name` to the same text."""
    return lambda text: variable(name, text, why)


def not_needed(why: str) -> Converter:
    """Return a converter for what has no equivalent and needs none."""
    return lambda text: Replacement(None, why=why)


def refused(why: str) -> Converter:
    """Return a converter that refuses: there is no equivalent, and the user has to decide."""
    return lambda text: Replacement(None, why=why, is_refused=True)
