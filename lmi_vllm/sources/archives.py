"""Archives of models and adapters: `.tar.gz`, `.tgz`, `.tar`, `.zip` and LMI's `.mar`.

A local archive is unpacked into the cache, under a name made from its path, size and time, so a
changed archive is unpacked again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.private_folders import new_private_folder
from lmi_vllm.sources.base import Limits
from lmi_vllm.sources.extract import ZIP_SUFFIXES, extract_archive
from lmi_vllm.sources.local import cache_directory

TAR_SUFFIXES: Final = (".tar.gz", ".tgz", ".tar")


def is_archive(name: str) -> bool:
    """Whether `name` is an archive that can be unpacked."""
    return name.lower().endswith(TAR_SUFFIXES + ZIP_SUFFIXES)


def without_archive_ending(name: str) -> str:
    """`name` without the ending of an archive."""
    endings = TAR_SUFFIXES + ZIP_SUFFIXES
    ending = next((end for end in endings if name.lower().endswith(end)), "")
    return name.removesuffix(name[len(name) - len(ending) :])


def unpacked_directory(archive: Path, environ: Mapping[str, str], kind: str = "model") -> Path:
    """The folder for the content of `archive`, whether it exists or not.

    Raises:
        OSError: the archive has gone.
    """
    status = archive.stat()
    identity = f"{archive.absolute()}\0{status.st_size}\0{status.st_mtime_ns}"
    return cache_directory(f"{kind}:{identity}", environ)


def unpack(
    archive: Path,
    environ: Mapping[str, str],
    shown: str,
    kind: str = "model",
    limits: Limits | None = None,
) -> Path:
    """The directory with the content of `archive`; `shown` is its name in errors.

    It appears whole or not at all; two processes may do this at once.

    Raises:
        DownloadError: it is damaged, holds what is never extracted, or does not fit on the disk.
    """
    try:
        target = unpacked_directory(archive, environ, kind)
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_private_folder(".unpacking-", target.parent) as folder:
            content = folder.path / "content"
            extract_archive(archive, content, shown, limits)
            try:
                content.rename(target)
            except OSError:
                if not target.is_dir():  # else another process has unpacked the same archive
                    raise
    except OSError as error:
        raise DownloadError(f"{shown} cannot be unpacked: {error}") from error
    return target
