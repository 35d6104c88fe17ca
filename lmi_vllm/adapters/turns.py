"""Small asyncio helpers of the adapter registry: one queue per name, and who still uses a load."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator


class Use:
    """How many requests hold one load of an adapter."""

    def __init__(self) -> None:
        self._count = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the load from being dropped while the body runs."""
        self._count += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self.idle.set()


class Turns:
    """A queue per name that exists only while somebody is in it."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait for those who came before under this name."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._users[name] = self._users.get(name, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]
