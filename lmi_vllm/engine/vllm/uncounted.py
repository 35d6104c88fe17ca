"""Requests of the server itself: vLLM's metrics do not count them.

vLLM also counts steps, and looks in the prefix cache. So its loggers are away while nothing else
runs, and are back before another request is added.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

_IS_UNCOUNTED: Final = ContextVar("lmi_vllm_is_uncounted", default=False)


class UncountedRequests:
    """The requests of one client that its metrics leave out."""

    def __init__(self) -> None:
        self._numbers: set[str] = set()
        self._bodies = 0
        self._manager: Any = None  # vLLM's, whose loggers are away
        self._loggers: list[Any] = []

    @contextlib.contextmanager
    def of_body(self, manager: Any, *, is_alone: bool) -> Iterator[None]:
        """Leave out what is asked in the body; `is_alone` says that no other request runs."""
        token = _IS_UNCOUNTED.set(True)
        self._bodies += 1
        if is_alone and manager is not None and self._manager is None:
            self._manager, self._loggers, manager.stat_loggers = manager, manager.stat_loggers, []
        try:
            yield
        finally:
            _IS_UNCOUNTED.reset(token)
            self._bodies -= 1
            if not self._bodies:
                self._numbers.clear()
                self._count_again()

    def note(self, number: str) -> bool:
        """Return whether a new request is left out."""
        if _IS_UNCOUNTED.get():
            self._numbers.add(number)
            return True
        self._count_again()
        return False

    def __contains__(self, number: str) -> bool:
        return number in self._numbers

    def _count_again(self) -> None:
        if self._manager is not None:
            self._manager.stat_loggers = self._loggers
            self._manager, self._loggers = None, []
