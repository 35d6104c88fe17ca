"""Paths of this machine, plain or as `file:` URLs, and where what is fetched is kept."""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import FetchRequest
from lmi_vllm.sources.trusted_folders import per_user_sibling, trusted_folder

MANIFEST_NAME: Final = ".lmi-fetch.json"  # what was fetched, in the directory itself
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


def cache_directory(url: str, environ: Mapping[str, str]) -> Path:
    """The cache folder for `url`: `<root>/download/<hash>`, as in the LMI container.

    Raises:
        StartupError: only the temporary directory can be written, and other users can change it.
    """
    # An archive is unpacked here before there are settings: its serving.properties is part of them.
    root = environ.get("SERVING_DOWNLOAD_DIR") or environ.get("DJL_CACHE_DIR")
    if not root:
        home = Path("~/.djl.ai").expanduser()
        usable = home if home.is_dir() else home.parent
        root = str(home if os.access(usable, os.W_OK) else _temporary_root())
    digest = hashlib.sha256(url.strip().encode()).hexdigest()[:40]
    return Path(root).expanduser().absolute() / "download" / digest


def _temporary_root() -> Path:
    """The folder below the temporary directory; another user may have created its name first."""
    usual = Path(tempfile.gettempdir()) / ".djl.ai"
    return trusted_folder(usual, per_user_sibling(usual), "what is fetched", "SERVING_DOWNLOAD_DIR")


def skip_single_folders(directory: Path) -> Path:
    """`directory`, or the directory below, as long as it is an only child."""
    children = [child for child in directory.iterdir() if child.name != MANIFEST_NAME]
    if len(children) == 1 and children[0].is_dir():
        return skip_single_folders(children[0])
    return directory
