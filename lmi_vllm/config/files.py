"""Which configuration files there are, and which of them applies."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from lmi_vllm.config.findings import Report
from lmi_vllm.config.properties import PropertiesFile, read_properties
from lmi_vllm.config.resolved import CommandLine
from lmi_vllm.sources.local import is_file, without_file_scheme
from lmi_vllm.sources.model_store import PROPERTIES_NAME, StoreFinding
from lmi_vllm.sources.table import is_store

_CONFIG_IN_HOME: Final = "conf/config.properties"


def config_properties(
    environ: Mapping[str, str], command_line: CommandLine, report: Report
) -> PropertiesFile | None:
    """config.properties: the one named on the command line, else the image's."""
    if command_line.config_file:
        return _read(Path(command_line.config_file), report)
    home = environ.get("MODEL_SERVER_HOME")
    path = Path(home, _CONFIG_IN_HOME) if home else None
    return _read(path, report) if path and is_file(path) else None


def serving_properties_paths(
    environ: Mapping[str, str], command_line: CommandLine, finding: StoreFinding
) -> Iterator[Path]:
    """The store's serving.properties, then that of the local directory given as model."""
    store_path = finding.properties_path
    if store_path is not None:
        yield store_path
    named = command_line.model or (None if command_line.demo else environ.get("HF_MODEL_ID"))
    if named and not is_store(named):
        path = Path(without_file_scheme(named)) / PROPERTIES_NAME
        if is_file(path) and (store_path is None or not path.samefile(store_path)):
            yield path


def choose_properties(
    paths: Iterable[Path], extra: PropertiesFile | None, report: Report
) -> PropertiesFile | None:
    """The one serving.properties that applies, `extra` last; others are named in warnings."""
    files = [file for path in paths if (file := _read(path, report))]
    if extra is not None and extra.path not in {file.path for file in files}:
        files.append(extra)
    for ignored in files[1:]:
        report.warn(f"{ignored.path} is not read: {files[0].path} applies")
    return files[0] if files else None


def _read(path: Path, report: Report) -> PropertiesFile | None:
    """The file's entries; an error where it cannot be read."""
    try:
        return read_properties(path)
    except (OSError, ValueError) as error:
        report.fail(f"{path} cannot be read: {getattr(error, 'strerror', error)}")
        return None
