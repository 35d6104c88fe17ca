"""The negative cache of adapter names; bounded, since clients can invent any number of names."""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from lmi_vllm.errors import LmiError

T = TypeVar("T")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_NAMES: Final = 10_000
ABSENT_SECONDS: Final = 30.0
UNREACHABLE_SECONDS: Final = 5.0  # before a store that did not answer is asked again


@dataclass(frozen=True, slots=True)
class NegativeEntry:
    """Why a name is not looked up before `until`: it is missing, or `error` refuses it."""

    until: float
    error: type[LmiError] | None = None
    text: str = ""
    version: str = ""  # the refused version; empty: not of one version


class NegativeCache:
    """Names that the store lacks or that were refused, for a time; and those a DELETE removed."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._absent: OrderedDict[str, NegativeEntry] = OrderedDict()
        self._removed: OrderedDict[str, None] = OrderedDict()  # so no invented name evicts these

    def __len__(self) -> int:
        return len(self._absent) + len(self._removed)

    def is_absent(self, name: str) -> bool:
        """Whether the name is known to be missing, or removed.

        Raises:
            LmiError: it was refused within the last `ABSENT_SECONDS`.
        """
        known = self._absent.get(name)
        if name in self._removed:
            return True
        if known is None or self._now() >= known.until:
            return False
        if known.error is not None:
            raise known.error(known.text)
        return True

    def refusal(self, name: str, version: str) -> str:
        """Return why this version was refused, however long ago; empty where it was not."""
        known = self._absent.get(name)
        return known.text if known is not None and known.version == version else ""

    def miss(self, name: str) -> None:
        """Remember that the store has no such adapter."""
        self._note(name, NegativeEntry(self._now() + ABSENT_SECONDS))

    def refuse(self, name: str, error: type[LmiError], text: str, version: str = "") -> None:
        """Remember that it cannot be served; the refusal of a `version` does not expire."""
        self._note(name, NegativeEntry(self._now() + ABSENT_SECONDS, error, text, version))

    def fail(self, name: str, error: type[LmiError], text: str, *, for_long: bool) -> None:
        """Remember that it could not be looked up: 5 s, or 30 s with `for_long`."""
        seconds = ABSENT_SECONDS if for_long else UNREACHABLE_SECONDS
        self._note(name, NegativeEntry(self._now() + seconds, error, text))

    def remove(self, name: str) -> None:
        """Hide a name that a DELETE has removed, until it is registered again."""
        _put(self._removed, name, None)

    def forget(self, name: str) -> None:
        """Drop the entry of a name that has been registered."""
        self._absent.pop(name, None)

    def _note(self, name: str, entry: NegativeEntry) -> None:
        _put(self._absent, name, entry)


def _put(names: OrderedDict[str, T], name: str, what: T) -> None:
    names[name] = what
    names.move_to_end(name)
    if len(names) > MAX_NAMES:
        names.popitem(last=False)
