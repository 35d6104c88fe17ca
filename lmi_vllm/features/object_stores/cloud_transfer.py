"""Transfers of listed objects into a directory by obstore: several ranges at once, to the disk."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmi_vllm.sources.base import InterruptedTransferError, StoredObject

if TYPE_CHECKING:
    from obstore import GetOptions

CONNECTIONS: Final = 16
PART_BYTES: Final = 64 << 20
CHUNK_BYTES: Final = 1 << 20  # of one connection in memory
UNFINISHED: Final = ".lmi-part"


def fetch(store: Any, objects: Sequence[StoredObject], directory: Path) -> None:
    """Fetch the objects; what is complete stays when another one fails, whose error is raised."""
    failure: BaseException | None = None
    with ThreadPoolExecutor(CONNECTIONS, "cloud-transfer") as pool:
        try:
            parts = [list(_submitted(pool, store, stored, directory)) for stored in objects]
            for stored, futures in zip(objects, parts, strict=True):
                errors = [error for future in futures if (error := _error_of(future)) is not None]
                if not errors:
                    _unfinished(directory, stored).replace(directory / stored.name)
                elif failure is None:
                    failure = errors[0]
                    pool.shutdown(wait=False, cancel_futures=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failure is not None:
        raise failure


def _unfinished(directory: Path, stored: StoredObject) -> Path:
    return directory / f"{stored.name}{UNFINISHED}"


def _submitted(
    pool: ThreadPoolExecutor, store: Any, stored: StoredObject, directory: Path
) -> Iterator[Future[None]]:
    for start in range(0, max(1, stored.size), PART_BYTES):
        end = min(stored.size, start + PART_BYTES)
        yield pool.submit(_fetch_part, store, stored, _unfinished(directory, stored), start, end)


def _error_of(part: Future[None]) -> BaseException | None:
    try:
        return part.exception()
    except CancelledError as error:
        return error


def _fetch_part(store: Any, stored: StoredObject, path: Path, start: int, end: int) -> None:
    """Write one range of the object to its place in the file.

    Raises:
        InterruptedTransferError: it ended early.
    """
    from obstore import get  # noqa: PLC0415

    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        if start == end:  # an empty object has no range
            return
        options: GetOptions = {"range": (start, end)}
        if stored.etag:
            options["if_match"] = f'"{stored.etag}"'
        for chunk in get(store, stored.key, options=options).stream(CHUNK_BYTES):
            os.pwrite(file, chunk, start)
            start += len(chunk)
    finally:
        os.close(file)
    if start != end:
        raise InterruptedTransferError(f"{stored.name} ended {end - start} bytes early")
