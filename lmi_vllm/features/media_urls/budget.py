"""Bounds on the bytes that URLs in messages bring: of one request, and of the whole server.

What was fetched stays in memory until its request ends. 40 URLs in a body of 3 KiB were 40 times
the largest file at once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from lmi_vllm.telemetry.records import RequestRecord, current_record

REQUEST_FILES: Final = 4  # a request may have so many largest files, and fetches so many at a time
SERVER_FILES: Final = 16  # all requests together, before the sources with most of them are refused


class MediaRefusedError(Exception):
    """A URL in a message is not fetched, or not completely; the text is for the client."""


class MediaBusyError(Exception):
    """Others have what the server may hold of fetched media; the client can try again."""


@dataclass(slots=True, eq=False)
class Held:
    """What one request holds."""

    source: str
    largest: int  # bytes of one file
    size: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REQUEST_FILES))


@dataclass(slots=True, eq=False)
class FetchBudget:
    """Counts what the requests of one server hold of fetched media."""

    _held: dict[int, Held] = field(default_factory=dict)  # by the id of the record, while it runs

    @asynccontextmanager
    async def fetch(self, largest: int) -> AsyncIterator[Held]:
        """Wait for one of the request's slots; give what its bytes are added to."""
        record = current_record()
        held = self._of(record, largest)
        try:
            async with held.slots:
                yield held
        finally:
            if record is None:
                del self._held[id(held)]

    def add(self, held: Held, size: int) -> None:
        """Count so many further bytes.

        Raises:
            MediaRefusedError: all files of the request are too large.
            MediaBusyError: the server holds too much, and this source more than an even part.
        """
        most = REQUEST_FILES * held.largest
        if held.size + size > most:
            raise MediaRefusedError(
                f"the media that URLs of the request lead to have more than {most} bytes, "
                f"{REQUEST_FILES} times LMI_MEDIA_MAX_SIZE"
            )
        sizes = {held.source: size}
        for one in self._held.values():
            sizes[one.source] = sizes.get(one.source, 0) + one.size
        most = SERVER_FILES * held.largest
        if sum(sizes.values()) > most and sizes[held.source] * len(sizes) > most:
            raise MediaBusyError(
                "the server holds as much fetched media as it may: try again later"
            )
        held.size += size

    def _of(self, record: RequestRecord | None, largest: int) -> Held:
        if record is None:
            held = Held("", largest)
            self._held[id(held)] = held
            return held
        if (key := id(record)) not in self._held:
            self._held[key] = Held(record.source, largest)
            record.at_end.append(lambda: self._held.pop(key, None))
        return self._held[key]
