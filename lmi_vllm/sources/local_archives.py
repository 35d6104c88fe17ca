"""Archives that lie on this machine, unpacked into the cache: models of the store, and adapters.

The directory is named after the archive's path, size and time, so that a changed archive is
unpacked anew and an unchanged one once.
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.archives import extract_archive
from lmi_vllm.sources.model_store import StoreFinding, entered
from lmi_vllm.sources.s3.download import cache_directory


def unpacked_directory(archive: Path, environ: Mapping[str, str], kind: str = "model") -> Path:
    """Where the content of `archive` is kept, whether it is there yet or not.

    Raises:
        OSError: the archive has gone.
    """
    status = archive.stat()
    identity = f"{archive.absolute()}\0{status.st_size}\0{status.st_mtime_ns}"
    return cache_directory(f"{kind}:{identity}", environ)


def unpack(archive: Path, environ: Mapping[str, str], shown: str, kind: str = "model") -> Path:
    """The directory with the content of `archive`, which errors call `shown`.

    It appears whole or not at all; two processes may do this at once.

    Raises:
        DownloadError: it is damaged, holds what is never extracted, or does not fit on the disk.
    """
    try:
        target = unpacked_directory(archive, environ, kind)
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target.parent))
    except OSError as error:
        raise DownloadError(f"{shown} cannot be unpacked: {error}") from error
    try:
        extract_archive(archive, work / "content", shown)
        if not target.exists():
            (work / "content").rename(target)
    except OSError as error:
        if not target.is_dir():  # else another process has unpacked the same archive
            raise DownloadError(f"{shown} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def with_unpacked(finding: StoreFinding, environ: Mapping[str, str]) -> StoreFinding:
    """`finding` with the directory of its archive, where that has been unpacked before."""
    if finding.archive is None or finding.directory is not None:
        return finding
    try:
        directory = unpacked_directory(finding.archive, environ)
    except OSError:
        return finding
    return replace(finding, directory=entered(directory)) if directory.is_dir() else finding
