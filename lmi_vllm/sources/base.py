"""The protocols of a source and of an object store, their errors, and how far a download is."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lmi_vllm.errors import DownloadError


class InterruptedTransferError(Exception):
    """A transfer was interrupted and can be retried; its text holds no secret.

    `retry_after_seconds` is how long the source asks to wait first.
    """

    def __init__(self, text: str = "", retry_after_seconds: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_seconds = retry_after_seconds


class RefusedAccessError(DownloadError):
    """The source answers, and refuses access; a copy that was fetched before may be used."""


class NothingThereError(DownloadError):
    """Nothing is there to fetch, and a copy that was fetched before would be of another source."""


class UnreachableError(Exception):
    """The source cannot be reached; a cached copy may be used instead."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """The state of one download; `seconds_left` is None until a rate is known."""

    files: int
    files_total: int
    bytes: int
    bytes_total: int
    bytes_per_second: float = 0.0
    seconds_left: float | None = None


class ProgressSink(Protocol):
    """Receives progress a few times a second, from any thread; it must return quickly."""

    def __call__(self, progress: DownloadProgress, /) -> None:
        """Receive one progress."""
        ...


def ignore_progress(progress: DownloadProgress, /) -> None:
    """Drop `progress`, for callers that show none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on the files and bytes of a source; a small archive can unpack to many."""

    files: int
    total_bytes: int
    setting: str = ""  # setting of `total_bytes`

    def check(self, source: str, files: int, total_bytes: int) -> None:
        """Check that neither exceeds the bounds for `source`.

        Raises:
            DownloadError: names the bound.
        """
        if files > self.files:
            raise DownloadError(f"{source} holds more than {self.files} files: too many")
        if total_bytes > self.total_bytes:
            raise DownloadError(
                f"{source} holds {total_bytes} bytes; at most {self.total_bytes} are taken"
                f"{self.named}"
            )

    @property
    def named(self) -> str:
        """The setting, as the end of a text."""
        return f" ({self.setting})" if self.setting else ""


# The files below a reference with their sizes, and its name in errors: the names to fetch.
SelectFiles = Callable[[Mapping[str, int], str], Collection[str]]
# An archive, its destination, its name in errors, bounds: name and size of each file.
Extract = Callable[[Path, Path, str, Limits | None], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """One model or adapter to fetch; a source ignores fields of other sources.

    `revision`, `ignore_patterns` and `download_dir` apply to hub ids only, and so do the rules for
    files that are left out. `destination` gets plain files, by the same rules. It is renamed when
    complete, and unchanged while the source is.
    """

    reference: str
    environ: Mapping[str, str] = field(repr=False)
    revision: str | None = None
    load_format: str | None = None
    ignore_patterns: Sequence[str] | None = None
    download_dir: Path | None = None  # the hub's cache
    destination: Path | None = None  # instead of a cache
    on_progress: ProgressSink = ignore_progress
    limits: Limits | None = None  # of the fetched files, and of the files of an archive
    select: SelectFiles | None = None  # of an adapter; it may refuse, before anything is fetched


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object: `name` is its path below the URL, `key` the whole key, `etag` its version."""

    name: str
    key: str
    size: int
    etag: str
    modified: float = 0.0  # seconds since the epoch, by the store's clock; 0 where it is not listed


class ObjectChangedError(Exception):
    """An object is no longer the version that was read: another writer has replaced it."""


class ObjectStore(Protocol):
    """The objects below one URL.

    Every method raises `DownloadError` for problems that the user has to solve, `UnreachableError`
    and `InterruptedTransferError` for temporary ones, and `OSError` for the local disk.
    """

    url: str  # as given, for messages
    listed_url: str  # the listed prefix: with a final slash, without a star

    def below(self, folder: str) -> "ObjectStore":
        """The objects of one folder of this prefix, over the same connections."""

    def list_objects(self, most: int | None = None) -> Sequence[StoredObject]:
        """Every object, without folder markers; an archive is the only object of its URL.

        Above `most` objects it may raise `DownloadError`.
        """

    def find(self, name: str) -> StoredObject | None:
        """The object of this name; None where there is none."""

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None where there is none."""

    def read_newer(self, name: str, etag: str) -> tuple[bytes | None, str]:
        """The content and ETag of a small object; None while it has this ETag, "" without one."""

    def write(self, name: str, content: bytes, etag: str | None = None) -> str:
        """Store the content as `name`, whole or not at all; return the new ETag.

        With `etag` only over that version, with "" only where there is none: `ObjectChangedError`.
        """

    def delete(self, name: str) -> None:
        """Delete the object if it exists."""

    def download(self, objects: Sequence[StoredObject], directory: Path, attempt: int) -> None:
        """Put each object into `directory` under its name; `attempt` counts from 0."""

    def is_intact(self, stored: StoredObject, path: Path) -> bool:
        """Whether `path`, whose size is right, may have the content of `stored`."""

    def upload(self, name: str, path: Path) -> None:
        """Store the file `path` as `name`; it appears whole or not at all."""


class Source(Protocol):
    """One kind of place for models and adapters."""

    def claims(self, reference: str) -> bool:
        """Whether `reference` belongs to this source."""

    def fetch(self, request: FetchRequest) -> Path:
        """The local directory with the requested files; appears whole or not at all."""

    def read_text(self, request: FetchRequest, name: str) -> str | None:
        """The text of one small file; None if there is no such file."""


@dataclass(frozen=True, slots=True)
class RepositoryFiles:
    """The files of a repository with their sizes, at its newest commit."""

    commit: str
    sizes: Mapping[str, int]


class Repositories(Source, Protocol):
    """The source of ids of a hub, which are neither paths nor URLs."""

    def list_files(self, request: FetchRequest) -> RepositoryFiles:
        """Every file of the requested repository; raises the errors of an ObjectStore."""


class Store(Source, Protocol):
    """A source of one URL scheme.

    Below such a URL is a whole model directory: its options, code and adapters count. A hub model
    is only weights.
    """

    @property
    def examples(self) -> tuple[str, ...]:
        """Example URLs for messages: a prefix and an archive."""

    def problem(self, reference: str) -> str:
        """Why a URL cannot be read on this machine, before it is asked for; empty if it can."""

    def lacking(self, reference: str, environ: Mapping[str, str]) -> str:
        """What the variables lack to read a URL, if its form can be read; empty for nothing."""

    def require_objects(self, request: FetchRequest) -> None:
        """Raise `NothingThereError` if the store answers, and has nothing below the URL."""

    @property
    def is_streamed_by_vllm(self) -> bool:
        """Whether vLLM's Run:ai loader reads weights from there by itself."""

    @property
    def make_store(self) -> Callable[[str, Mapping[str, str]], ObjectStore]:
        """The opener of a URL's objects; it raises `DownloadError` for an invalid URL."""
