"""Resolves adapter sources: `src` of a call or a folder becomes a checked directory."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from lmi_vllm.adapters.check import check_adapter, check_folder
from lmi_vllm.adapters.copies import FetchedCopies
from lmi_vllm.adapters.listing import adapter_files, adapter_folder
from lmi_vllm.checks.adapter_config import CONFIG, PICKLED_WEIGHTS, WEIGHTS
from lmi_vllm.checks.base_model import BaseModel
from lmi_vllm.checks.chat_templates import own_chat_template
from lmi_vllm.errors import (
    AdapterConflictError,
    AdapterMissingError,
    AdapterRefusedError,
    BadParameterError,
    DownloadError,
)
from lmi_vllm.masked_urls import mask_urls
from lmi_vllm.sources.archives import is_archive, unpack
from lmi_vllm.sources.base import FetchRequest, Limits
from lmi_vllm.sources.local import cache_directory, file_url_path, without_file_scheme
from lmi_vllm.sources.table import Sources
from lmi_vllm.sources.trusted_folders import untrusted_code_reason

logger = logging.getLogger(__name__)

HUB_SWITCH: Final = "LMI_ADAPTER_HUB"
ROOTS: Final = "LMI_ADAPTER_ROOTS"
CODE_FILE: Final = "model.py"
CUSTOM_CODE: Final = "LMI_CUSTOM_CODE"
MAX_SIZE: Final = "LMI_ADAPTER_MAX_SIZE"
MAX_FILES: Final = 10_000
_SHOWN_CHARACTERS: Final = 200
_MACS: Final = "__MACOSX"  # a folder in archives that macOS makes
_NO_ADAPTERS: Final = frozenset({"lost+found", _MACS, "__pycache__"})  # folders beside adapters
_OTHER_ARCHIVES: Final = (".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".7z", ".rar", ".gz")


@dataclass(frozen=True, slots=True)
class AdapterPolicy:
    """The settings for adapters: `roots` are the only folders that adapters may come from."""

    hub: bool = False
    named: frozenset[str] = frozenset()  # by the settings themselves: hub ids, too
    roots: tuple[Path, ...] = ()
    max_bytes: int = 16 << 30
    code: str = "local"
    is_secure: bool = False
    forbidden: Callable[[Path], tuple[str, ...]] = lambda _: ()  # in an adapter's folder


@dataclass(frozen=True, slots=True)
class AdapterSources:
    """Resolves adapter sources for one served model."""

    sources: Sources
    environ: Mapping[str, str]
    policy: AdapterPolicy = field(default_factory=AdapterPolicy)
    base: BaseModel = field(default_factory=BaseModel)
    model_directory: Path | None = None
    own: frozenset[str] = frozenset()  # adapters of the model directory are always allowed
    chat_template: str = ""  # that chats are rendered with
    copies: FetchedCopies | None = None  # what is fetched stays without it

    def resolve(self, src: str) -> str:
        """Return the local directory of a source, once it is fetched and checked.

        What was fetched for it stays until it is released as often as it was resolved.

        Raises:
            AdapterConflictError: a URL scheme that is never fetched.
            AdapterRefusedError: it is not allowed, missing, cannot be fetched, or not an adapter.
            BadParameterError: secure mode forbids what it brings.
        """
        key = self._copied_from(src)
        if key is None or self.copies is None:
            return self.checked(*self._located(src))
        self.copies.hold(key)
        try:
            located = self._located(src)
            self.copies.found(key, located[0])
            return self.checked(*located)
        except BaseException:
            self.copies.release(key)
            raise

    def release(self, src: str) -> None:
        """Drop what was fetched for an adapter of this source, unless another one uses it."""
        key = self._copied_from(src)
        if key is not None and self.copies is not None:
            self.copies.release(key)

    def _located(self, src: str) -> tuple[Path, str, Path | None]:
        folder, local = self._locate(src)
        return folder, src, local

    def _copied_from(self, src: str) -> str | None:
        """Return what a copy is fetched or unpacked from; None where files are used in place."""
        try:
            named = file_url_path(src)
        except ValueError:
            return None
        if named is None and self.sources.is_store(src):
            return src.strip()
        path = (named or Path(src)).absolute()
        return str(path) if is_archive(path.name) else None

    def checked(self, folder: Path, src: str, local: Path | None = None) -> str:
        """Return the directory of the adapter in `folder`, once it is checked.

        `local` is the path that the adapter came from; None if it was fetched from `src`.

        Raises:
            AdapterRefusedError: it is not a valid adapter, or brings code that may not be run.
            BadParameterError: secure mode forbids what it brings.
        """
        check_folder(folder, src)
        self._check_security(folder, src)
        folder = self._confined(_adapter_folder(folder, src), src, local)
        self._check_size(folder, src)
        check_adapter(folder, src, self.base)
        self._check_code(folder, src, local)
        self._warn_of_chat_template(folder, src)
        return str(folder)

    def _locate(self, src: str) -> tuple[Path, Path | None]:
        """Return the folder of the files, and the local path they came from; None if fetched."""
        try:
            named = file_url_path(src)
            scheme = urlsplit(src).scheme if named is None and "://" in src else ""
        except ValueError as error:  # an incomplete IPv6 address, or another machine
            raise AdapterRefusedError(f"{src} is not a valid URL: {error}") from error
        if scheme and self.sources.is_store(src):
            return self._unpacked(self._fetched(src), src), None
        if scheme:
            kinds = ("a folder", "an archive", "a file: URL", *self.sources.prefix_examples())
            raise AdapterConflictError(
                f"URL adapters are not currently supported: {scheme}:// sources. src is "
                f"{', '.join(kinds)} or a hub id"
            )
        path = (named or Path(src)).absolute()
        is_hub_id = not src.startswith(("/", ".", "~")) and src.count("/") == 1
        if _exists(path, src) or named is not None or not is_hub_id:
            self._check_root(path, src)
            return self._unpacked(path, src), path
        if not self.policy.hub and src not in self.policy.named:
            raise AdapterMissingError(
                f"Only local LoRA models are supported. {src} is not a valid path; if it is a hub "
                f"id, set {HUB_SWITCH}=true"
            )
        return self._fetched(src), None

    def _fetched(self, src: str) -> Path:
        try:
            return self.sources.fetch_model(
                FetchRequest(src, self.environ, limits=self.limits, select=adapter_files)
            )
        except DownloadError as error:
            raise AdapterRefusedError(error.text) from error

    def _check_root(self, path: Path, src: str) -> None:
        """Check that the path, with links followed, is below an allowed folder."""
        if src in self.own:
            return
        roots = named = self.policy.roots
        if self.policy.is_secure and not named:  # secure mode then uses its own roots
            cache = cache_directory("", self.environ).parent.parent
            roots = (cache, *([self.model_directory] if self.model_directory else []))
        real = path.resolve()
        if not roots or any(real.is_relative_to(root.resolve()) for root in roots):
            return
        if named:
            raise AdapterRefusedError(f"{src} is not below one of the folders of {ROOTS}")
        reason = self.policy.forbidden(path)
        place = f"secure mode takes adapters from the model directory and {ROOTS} only"
        raise BadParameterError(f"{src}: {'; '.join((place, *reason))}")

    def _confined(self, folder: Path, src: str, local: Path | None) -> Path:
        """Return a local folder without links, whose files lie below the allowed folders, too.

        The engine's copy looks at each file again once it is open (`adapter_files`).
        """
        if local is None or not local.is_dir() or src in self.own:
            return folder
        for name in ("", CONFIG, WEIGHTS, *PICKLED_WEIGHTS, CODE_FILE):
            self._check_root(folder / name, src)
        return folder.resolve() if self.policy.roots else folder

    def _unpacked(self, path: Path, src: str) -> Path:
        """Return the folder of an archive's content; other paths unchanged."""
        if not path.is_file():
            return path
        if not is_archive(path.name) and path.name.lower().endswith(_OTHER_ARCHIVES):
            raise AdapterRefusedError(
                f"{src} is an archive of a kind that is not unpacked: .tar.gz, .tgz, .tar and .zip "
                "are"
            )
        if not is_archive(path.name):
            return path
        try:
            return unpack(path, self.environ, src, kind="adapter", limits=self.limits)
        except DownloadError as error:
            raise AdapterRefusedError(error.text) from error

    @property
    def limits(self) -> Limits:
        """The limits of what is fetched or unpacked for one adapter."""
        return Limits(MAX_FILES, self.policy.max_bytes, MAX_SIZE)

    def _check_security(self, folder: Path, src: str) -> None:
        """Check that secure mode, where it is on, allows the files."""
        if violations := self.policy.forbidden(folder):
            raise BadParameterError(f"{src}: {'; '.join(violations)}")

    def _check_size(self, folder: Path, src: str) -> None:
        """Check the size of the files that are read of an adapter, local ones included."""
        files = (folder / name for name in (CONFIG, WEIGHTS, *PICKLED_WEIGHTS))
        size = sum(file.stat().st_size for file in files if file.is_file())
        try:
            self.limits.check(src, 1, size)
        except DownloadError as error:
            raise AdapterRefusedError(error.text) from error

    def _check_code(self, folder: Path, src: str, local: Path | None) -> None:
        """Check that the adapter has no code, or code that may run or is ignored."""
        allowed = self.policy.code
        if not (folder / CODE_FILE).is_file() or self._came_with_the_model(src, local):
            return
        if local is None and allowed != "all":
            raise AdapterRefusedError(
                f"{src} brings a {CODE_FILE}; code that was fetched is loaded only with "
                f"{CUSTOM_CODE}=all"
            )
        if allowed == "none":
            return
        if local is None:
            self._check_owner(src, folder)
            return
        if allowed not in ("roots", "all") or not self.policy.roots:
            raise AdapterRefusedError(
                f"{src} brings a {CODE_FILE}; code of adapters that are registered while the "
                f"server runs is loaded only with {CUSTOM_CODE}=roots and from below {ROOTS}"
            )
        self._check_owner(src, local, folder)

    def _warn_of_chat_template(self, folder: Path, src: str) -> None:
        """Warn of a chat template that chats with this adapter are not rendered with."""
        name, template = own_chat_template(folder)
        if template and template != self.chat_template.strip():
            other = "differs from the served one" if self.chat_template else "is not used"
            logger.warning(
                "%s: the adapter's own chat template (%s) %s: chats with every adapter are "
                "rendered with the model's, or with option.chat_template",
                mask_urls(src),
                name,
                other,
            )

    def _check_owner(self, src: str, *places: Path) -> None:
        """Check that no other user can have written the code."""
        for place in places:
            if reason := untrusted_code_reason(place, CODE_FILE):
                raise AdapterRefusedError(f"{src} brings a {CODE_FILE}: {reason}")

    def _came_with_the_model(self, src: str, local: Path | None) -> bool:
        """Whether the adapter is as trusted as the model."""
        if src in self.own:
            return True
        if local is None or self.model_directory is None:
            return False
        return local.resolve().is_relative_to(self.model_directory.resolve())


def local_adapters(directory: Path | None, folder: str) -> dict[str, Path]:
    """Return name -> path of the adapters below a model directory, sorted by name."""
    root = directory / without_file_scheme(folder) if directory is not None else None
    if root is None or not root.is_dir():
        return {}
    return {
        child.name: child.absolute()
        for child in sorted(root.iterdir())
        if child.is_dir() and not child.name.startswith(".") and child.name not in _NO_ADAPTERS
    }


def _exists(path: Path, src: str) -> bool:
    """Whether `path` exists.

    Raises:
        AdapterRefusedError: it is not a valid path: too long, with a zero byte, or a loop of links.
    """
    try:
        path.lstat()
        path.resolve()
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RuntimeError) as error:  # up to Python 3.12
        reason = getattr(error, "strerror", None) or str(error)
        raise AdapterRefusedError(
            f"Only local LoRA models are supported. {src[:_SHOWN_CHARACTERS]!r} is not a valid "
            f"path: {reason}"
        ) from error
    return True


def _adapter_folder(folder: Path, src: str) -> Path:
    """Return the folder, or the nearest one below it with an adapter: archives contain folders.

    Raises:
        AdapterRefusedError: there are several as near.
    """
    if (folder / CONFIG).exists() or not folder.is_dir():
        return folder
    found = [*folder.glob(f"[!.]*/{CONFIG}"), *folder.glob(f"[!.]*/[!.]*/{CONFIG}")]
    names = [str(path.relative_to(folder)) for path in found if _MACS not in path.parts]
    if not names:
        return folder
    try:
        return folder / adapter_folder(names, src)
    except DownloadError as error:
        raise AdapterRefusedError(error.text) from error
