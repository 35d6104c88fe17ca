"""Local paths, plain or as `file:` URLs; they are never fetched."""

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import FetchRequest

_THIS_MACHINE: Final = ("", "localhost")


def file_url_path(reference: str) -> Path | None:
    """The path of a `file:` URL; None for any other text.

    `file:/x`, `file:///x` and `file://localhost/x` are the same (RFC 8089).

    Raises:
        ValueError: the URL names another machine, or is none at all.
    """
    if reference[:5].lower() != "file:":
        return None
    parts = urlsplit(reference)
    if parts.netloc not in _THIS_MACHINE:
        raise ValueError(f"{reference} names the machine {parts.netloc}: write file:///path")
    return Path(unquote(parts.path))


def without_file_scheme(reference: str) -> str:
    """The path of a local `file:` URL; any other text unchanged."""
    try:
        path = file_url_path(reference)
    except ValueError:
        return reference
    return reference if path is None else str(path)


def looks_like_path(reference: str) -> bool:
    """Whether `reference` can only be a path or a `file:` URL."""
    return reference.startswith(("/", "./", "../", "~")) or reference[:5].lower() == "file:"


def is_url(reference: str) -> bool:
    """Whether `reference` is a URL, of a store perhaps, and no path of this machine."""
    return "://" in reference and not looks_like_path(reference)


def is_directory(path: Path | str) -> bool:
    """Whether `path` is a directory; False for a text that cannot be a path."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def is_file(path: Path | str) -> bool:
    """Whether `path` is a file; False for a text that cannot be a path."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


class LocalPaths:
    """The source of local files."""

    def claims(self, reference: str) -> bool:
        """Whether it exists here, or can only be a path."""
        return looks_like_path(reference) or is_directory(reference) or is_file(reference)

    def fetch(self, request: FetchRequest) -> Path:
        """The path itself."""
        path = Path(without_file_scheme(request.reference))
        if not (is_directory(path) or is_file(path)):
            raise DownloadError(f"{request.reference} does not exist: check the path of the model")
        if request.destination is not None:
            raise DownloadError(
                f"{request.reference} is a local path already: copy it to {request.destination}"
            )
        return path

    def read_text(self, request: FetchRequest, name: str) -> str | None:
        """The text of a file in the directory."""
        path = Path(without_file_scheme(request.reference)) / name
        return path.read_text("utf-8") if is_file(path) else None
