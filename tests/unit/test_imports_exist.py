"""Tests that start engines are not collected by `make check`; their imports are looked at here."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("lmi_vllm", "tests", "integration", "scripts")
BINDS = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Name, ast.Import, ast.ImportFrom,
)  # fmt: skip


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every import of a source, and what else may bind a name: most modules are asked for both."""
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, BINDS))


@cache
def defined(module: str) -> frozenset[str]:
    """Every name that a module of this repository binds, and the modules of a package."""
    path = ROOT.joinpath(*module.split("."))
    is_file = path.with_suffix(".py").exists()  # as in Python, it counts before a folder
    file = path.with_suffix(".py") if is_file else path / "__init__.py"
    found = set() if is_file or not path.is_dir() else {one.stem for one in path.iterdir()}
    if not file.exists():
        return frozenset(found)
    for node in nodes(file.read_text(encoding="utf-8")):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return frozenset(found)


def missing(source: str) -> Iterator[str]:
    """Yield each import of ours in `source` that has nothing behind it."""
    for node in nodes(source):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if node.module.split(".")[0] not in FOLDERS or node.module == "lmi_vllm":
            continue
        for alias in node.names:
            if alias.name not in defined(node.module):
                yield f"{node.module}.{alias.name}"


FILES = [
    path.relative_to(ROOT)
    for folder in ("tests", "integration", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_of_ours_exist(path: Path) -> None:
    """A name that moved is found in seconds, not when an engine has started."""
    assert list(missing((ROOT / path).read_text(encoding="utf-8"))) == []


def test_missing_name_is_found() -> None:
    """The check does fail: the module exists, the name and the other module do not."""
    source = "from lmi_vllm.errors import LmiError, Nothing\nfrom tests.nowhere import Other\n"
    assert importlib.util.find_spec("lmi_vllm.errors") is not None
    assert list(missing(source)) == ["lmi_vllm.errors.Nothing", "tests.nowhere.Other"]
