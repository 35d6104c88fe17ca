"""Archives unpacked so that nothing can land outside of the destination.

Only plain files and directories are taken: links and devices are refused, as are names that leave
the directory. Owners and modes in the archive are not followed.
"""

import errno
import io
import lzma
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, cast

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import Limits
from lmi_vllm.sources.disk import SPACE_ADVICE, require_space

ZIP_SUFFIXES: Final = (".zip", ".mar")
MAX_LIST_BYTES: Final = 4 << 20  # of a zip's entries: 28000 with names of 100 characters
MAX_BETWEEN_BYTES: Final = 1 << 20  # of a tar, between two files: names have 4096 at most
_COPY_BYTES: Final = 1 << 20
_GZIP: Final = 31  # zlib's number of the format
_GZIP_MARK: Final = b"\x1f\x8b"
_DAMAGE: Final = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a compression that Python does not read
    # What tarfile and zipfile raise of headers that are cut off or lie (found by fuzzing).
    TypeError,
    ValueError,
    IndexError,
    OverflowError,
    struct.error,
    RuntimeError,
    lzma.LZMAError,
    # A name that is a file and a folder at once, or no name at all.
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
)
# Names that cannot be one; bz2 raises an OSError without a number for bytes that are none of its.
_BAD_CONTENT: Final = (None, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)


class _BoundedReads(io.FileIO):
    """A file that gives few bytes at a time: `zipfile` reads the whole list of entries at once."""

    def __init__(self, archive: Path, source: str) -> None:
        super().__init__(archive)
        self._source = source

    def read(self, size: int | None = -1, /) -> bytes:
        """The next `size` bytes.

        Raises:
            DownloadError: more are asked for than a list of entries may have.
        """
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > MAX_LIST_BYTES:
            raise DownloadError(
                f"{self._source} is not extracted: its list of entries has {size} bytes, more than "
                f"{MAX_LIST_BYTES}"
            )
        return super().read(size) or b""


class _Unpacked:
    """What a .tar.gz holds, counted between the files in it: names and lists are in memory whole.

    Blocks are large: after each, the interpreter's lock is waited for while vLLM is imported.
    """

    def __init__(self, file: IO[bytes], source: str) -> None:
        self._file = file
        self._source = source
        self._rest = file.read(_COPY_BYTES)
        is_zipped = self._rest.startswith(_GZIP_MARK)
        self._gunzip: Any = zlib.decompressobj(_GZIP) if is_zipped else None
        self._total = 0
        self.expect(0)

    def expect(self, size: int) -> None:
        """A file of `size` bytes comes next."""
        self._most = self._total + size + MAX_BETWEEN_BYTES + 2 * _COPY_BYTES  # reads are ahead

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end.

        Raises:
            DownloadError: there are more between two files than any archive has.
            EOFError: it is cut off.
        """
        piece = self._plain(size) if self._gunzip is None else self._unzipped(size)
        self._total += len(piece)
        if self._total > self._most:
            raise DownloadError(
                f"{self._source} is not extracted: between its files it has more than "
                f"{MAX_BETWEEN_BYTES} bytes of names and lists"
            )
        return piece

    def _plain(self, size: int) -> bytes:
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece or self._file.read(size)

    def _unzipped(self, size: int) -> bytes:
        while True:
            if self._gunzip.eof:  # several are one after another
                self._rest = self._gunzip.unused_data or self._file.read(_COPY_BYTES)
                if not self._rest.startswith(_GZIP_MARK):
                    return b""
                self._gunzip = zlib.decompressobj(_GZIP)
            elif not self._rest:
                self._rest = self._file.read(_COPY_BYTES)
            is_end = not self._rest
            piece: bytes = self._gunzip.decompress(self._rest, size)
            self._rest = self._gunzip.unconsumed_tail
            if piece:
                return piece
            if is_end and not self._gunzip.eof:
                raise EOFError("it is cut off")


def extract_archive(
    archive: Path, destination: Path, source: str, limits: Limits | None = None
) -> dict[str, int]:
    """Extract `archive` below `destination`; return name and size of every file.

    `source` is the name of the archive in errors.

    Raises:
        DownloadError: it is damaged, beyond `limits`, or holds what is never extracted.
    """
    destination.mkdir(parents=True)
    with _reporting_damage(source):
        if archive.name.lower().endswith(ZIP_SUFFIXES):
            return _extract_zip(archive, destination, source, limits)
        return _extract_tar(archive, destination, source, limits)


@contextmanager
def _reporting_damage(source: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as e:
        raise DownloadError(f"{source} is damaged or not an archive of its kind: {e}") from e
    except OSError as e:
        if e.errno not in _BAD_CONTENT:
            raise
        raise DownloadError(f"{source} holds what cannot be extracted: {e}") from e


def _extract_tar(
    archive: Path, destination: Path, source: str, limits: Limits | None
) -> dict[str, int]:
    # How much a tar.gz holds is known only at its end; weights hardly compress.
    require_space(source, archive.stat().st_size, destination, SPACE_ADVICE)
    sizes: dict[str, int] = {}
    written = 0
    with archive.open("rb") as file:
        unpacked = _Unpacked(file, source)
        readable = cast("IO[bytes]", unpacked)  # tarfile calls `read` only
        with tarfile.open(fileobj=readable, mode="r|", bufsize=_COPY_BYTES) as members:
            for count, member in enumerate(members, start=1):
                written += member.size  # before its bytes are: a link or a device has none
                if limits is not None and (count > limits.files or written > limits.total_bytes):
                    reason = f"is more than may be unpacked{limits.named}"
                    raise _refused(source, member.name, reason)
                if not (member.isfile() or member.isdir()):
                    raise _refused(source, member.name, "is a link or a device")
                path = _safe_path(destination, member.name, source)
                unpacked.expect(member.size)
                content = members.extractfile(member) if member.isfile() else None
                _write(path, content)
                if content is not None:
                    sizes[str(path.relative_to(destination))] = member.size
                unpacked.expect(0)
    return sizes


def _extract_zip(
    archive: Path, destination: Path, source: str, limits: Limits | None
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    with _BoundedReads(archive, source) as file, zipfile.ZipFile(file) as members:
        infos = members.infolist()
        total = sum(info.file_size for info in infos)  # Python writes no more than is declared
        if limits is not None:
            limits.check(source, len(infos), total)
        require_space(source, total, destination, SPACE_ADVICE)
        for info in infos:
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(source, info.filename, "is a link or a device")
            if info.flag_bits & 0x1:
                raise _refused(source, info.filename, "is encrypted")
            path = _safe_path(destination, info.filename, source)
            if info.is_dir():
                _write(path, None)
                continue
            with members.open(info) as content:
                _write(path, content)
            sizes[str(path.relative_to(destination))] = info.file_size
    return sizes


def _safe_path(destination: Path, name: str, source: str) -> Path:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise _refused(source, name, "would leave its directory")
    return destination.joinpath(*pure.parts)


def _write(path: Path, content: IO[bytes] | None) -> None:
    """Create the directory `path`, or the file with `content`."""
    if content is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file, _COPY_BYTES)


def _refused(source: str, name: str, reason: str) -> DownloadError:
    return DownloadError(f"{source} is not extracted: its entry {name!r} {reason}")
