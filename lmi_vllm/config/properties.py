"""Java properties files: their entries with line numbers, and the files that apply."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.setting import CommandLine, Report
from lmi_vllm.messages import Origin, OriginKind
from lmi_vllm.sources.local import is_file, without_file_scheme
from lmi_vllm.sources.model_store import PROPERTIES_NAME, StoreFinding
from lmi_vllm.sources.table import Sources

_CONFIG_IN_HOME: Final = "conf/config.properties"
_ESCAPES: Final = MappingProxyType({"t": "\t", "n": "\n", "r": "\r", "f": "\f"})
_BLANK: Final = " \t\f"


@dataclass(frozen=True, slots=True)
class PropertyLine:
    """One `key=value` and the line it begins on (from 1)."""

    key: str
    value: str
    line: int


@dataclass(frozen=True, slots=True)
class PropertiesFile:
    """The entries of one file, in order, duplicates included."""

    path: str
    entries: tuple[PropertyLine, ...]

    def by_key(self) -> Mapping[str, PropertyLine]:
        """The entry that counts for each key: the last one."""
        return {entry.key: entry for entry in self.entries}

    def origin(self, entry: PropertyLine) -> Origin:
        """The origin of `entry`."""
        return Origin(OriginKind.FILE, self.path, entry.line)

    def duplicates(self) -> tuple[str, ...]:
        """One sentence for each key that is there more than once, with the lines."""
        lines: dict[str, list[int]] = {}
        for entry in self.entries:
            lines.setdefault(entry.key, []).append(entry.line)
        return tuple(
            f"{self.path}: {key} is set on lines {', '.join(map(str, numbers))}; "
            f"the last one counts"
            for key, numbers in lines.items()
            if len(numbers) > 1
        )


def read_properties(path: Path) -> PropertiesFile:
    """The file's entries, read as UTF-8, or as Latin-1 if the bytes are not UTF-8."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return parse_properties(text, str(path))


def parse_properties(text: str, path: str = "serving.properties") -> PropertiesFile:
    """The entries of properties `text`; as in Java, every text is valid."""
    entries = []
    for number, line in _logical_lines(text):
        key, value = _split(line)
        entries.append(PropertyLine(_unescape(key), _unescape(_strip_end(value)), number))
    return PropertiesFile(path, tuple(entries))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with numbers: joined at final backslashes, without comments and blanks."""
    lines = re.split(r"\r\n|\n|\r", text)
    index = 0
    while index < len(lines):
        number, line = index + 1, lines[index].lstrip(_BLANK)
        index += 1
        if not line or line[0] in "#!":
            continue
        while _is_continued(line):
            line = line[:-1]
            if index == len(lines):
                break
            line += lines[index].lstrip(_BLANK)
            index += 1
        if line:
            yield number, line


def _is_continued(line: str) -> bool:
    """Whether an odd number of backslashes ends the line."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _split(line: str) -> tuple[str, str]:
    """Key and value, still escaped, split at the first separator without a backslash."""
    index = 0
    while index < len(line) and line[index] not in "=:" + _BLANK:
        index += 2 if line[index] == "\\" else 1
    key, rest = line[:index], line[index:].lstrip(_BLANK)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANK)
    return key, rest


def _strip_end(value: str) -> str:
    """`value` without trailing blanks; a blank after a backslash stays."""
    stripped = value.rstrip()
    if stripped != value and _is_continued(stripped):
        return value[: len(stripped) + 1]
    return stripped


def _unescape(text: str) -> str:
    """`text` with its backslash escapes replaced; surrogate pairs are joined."""

    def replace(match: re.Match[str]) -> str:
        """What one escape stands for."""
        escaped = match.group(1)
        if len(escaped) > 1:
            return chr(int(escaped[1:], 16))
        return _ESCAPES.get(escaped, escaped)

    plain = re.sub(r"(?s)\\(u[0-9a-fA-F]{4}|.|$)", replace, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def config_properties(
    environ: Mapping[str, str], command_line: CommandLine, report: Report
) -> PropertiesFile | None:
    """config.properties: the one of the command line, else that of the image."""
    if command_line.config_file:
        return _read(Path(command_line.config_file), report)
    home = environ.get("MODEL_SERVER_HOME")
    path = Path(home, _CONFIG_IN_HOME) if home else None
    return _read(path, report) if path and is_file(path) else None


def serving_properties_paths(
    environ: Mapping[str, str], command_line: CommandLine, finding: StoreFinding, sources: Sources
) -> Iterator[Path]:
    """The store's serving.properties, then that of the local model directory."""
    store_path = finding.properties_path
    if store_path is not None:
        yield store_path
    named = command_line.model or (None if command_line.demo else environ.get("HF_MODEL_ID"))
    if named and not sources.is_store(named):
        path = Path(without_file_scheme(named)) / PROPERTIES_NAME
        if is_file(path) and (store_path is None or not path.samefile(store_path)):
            yield path


def choose_properties(
    paths: Iterable[Path], extra: PropertiesFile | None, report: Report
) -> PropertiesFile | None:
    """The one serving.properties that applies, `extra` last; warnings name the others."""
    files = [file for path in paths if (file := _read(path, report))]
    if extra is not None and extra.path not in {file.path for file in files}:
        files.append(extra)
    for ignored in files[1:]:
        report.warn(f"{ignored.path} is not read: {files[0].path} applies")
    return files[0] if files else None


def _read(path: Path, report: Report) -> PropertiesFile | None:
    """The file's entries; an error if it cannot be read."""
    try:
        return read_properties(path)
    except (OSError, ValueError) as error:
        report.fail(f"{path} cannot be read: {getattr(error, 'strerror', error)}")
        return None
