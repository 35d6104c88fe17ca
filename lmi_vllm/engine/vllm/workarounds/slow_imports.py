"""Transformers is imported with two of its lists made in a fraction of the time.

`packages_distributions`: Transformers asks Python which package each installed module is of. Python
parses all that packages say of themselves, and makes an object of every file of theirs.

`reads_once`: Transformers reads the sources of its models when it is imported, and again with
`transformers.models`. It keeps what it has read of 128 folders, and has 500.

Upstream: not reported that we know of.
Releases: Transformers 5.19; others were not looked at.
Shows: a start is a second longer.
May go: when test_plain_transformers_reads_its_sources_twice fails, and
    test_packages_are_listed_as_by_python finds no file that is left out.
"""

import contextlib
import csv
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any, Final

from lmi_vllm.engine.vllm.workarounds import replace

_READER: Final = "transformers.utils.import_utils"
_BY_PYTHON: Final = metadata.packages_distributions
_NAME: Final = "name:"


class ShortDistribution:
    """A distribution with its name alone, and one file where more would name the same module."""

    def __init__(self, real: metadata.Distribution) -> None:
        self._real = real
        self.read_text = real.read_text

    @functools.cached_property
    def metadata(self) -> Any:
        """The name; all that there is where it has none."""
        for line in (self.read_text("METADATA") or "").splitlines():
            if line.lower().startswith(_NAME):
                return {"Name": line[len(_NAME) :].lstrip(" \t")}
            if not line:
                break
        return self._real.metadata

    @functools.cached_property
    def files(self) -> Any:
        """One for each folder at the top and kind, Python's or another; all if none are listed."""
        kept: dict[tuple[str, str, bool], str] = {}
        for row in csv.reader((self.read_text("RECORD") or "").splitlines()):
            name = row[0] if row else ""
            top, slash, _ = name.partition("/")
            kept.setdefault((top, slash, name.endswith(".py")), name)
        return [metadata.PackagePath(name) for name in kept.values()] or self._real.files


def packages_distributions() -> Mapping[str, list[str]]:
    """As Python's function of this name, of shorter distributions."""

    def distributions() -> Iterator[ShortDistribution]:
        return map(ShortDistribution, metadata.distributions())

    names = {**vars(metadata), "distributions": distributions}
    found: Mapping[str, list[str]] = FunctionType(_BY_PYTHON.__code__, names)()
    return found


class _ReaderFinder(MetaPathFinder):
    """Finds the module of Transformers that reads sources, and lets it keep what it has read."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find that module as Python does; no other one."""
        if fullname != _READER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_widen(module: ModuleType) -> None:
            run(module)
            reads_once(module)

        spec.loader.exec_module = run_and_widen  # type: ignore[method-assign]
        return spec


def reads_once(reader: Any) -> None:
    """Let the module keep what it has read of every folder."""
    read: Any = getattr(reader, "create_import_structure_from_path", None)
    if hasattr(read, "__wrapped__"):
        reader.create_import_structure_from_path = functools.cache(read.__wrapped__)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import Transformers in the body with both lists made quickly."""
    finder = _ReaderFinder()
    sys.meta_path.insert(0, finder)
    try:
        with replace("importlib.metadata:packages_distributions", lambda _: packages_distributions):
            yield
    finally:
        sys.meta_path.remove(finder)
