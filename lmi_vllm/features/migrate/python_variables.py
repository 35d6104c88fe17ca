"""Variables in the Python code that deploys a server, also in a notebook."""

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

Variables = dict[str, str | None]  # None: the value is not in the code


def from_notebook(text: str) -> Variables:
    """Variables of the Python in a notebook; lines for the shell and of magic are left out."""
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, TypeError, KeyError):
        return {}
    found: Variables = {}
    for source in sources:
        lines = (line for line in source.split("\n") if line.lstrip()[:1] not in ("%", "!"))
        found |= from_python("\n".join(lines))
    return found


def from_python(text: str) -> Variables:
    """Variables of a piece of Python; the value of an expression is not known."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: Variables = {}
    for node in ast.walk(tree):
        for name, value in _assignments(node):
            if isinstance(name, str) and re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
                found[name] = _constant(value)
    return found


def _assignments(node: ast.AST) -> Iterator[tuple[Any, ast.expr]]:
    """Yield names and values of a dict, of `dict(NAME=…)`, and of `env["NAME"] = …`."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield (key.value if isinstance(key, ast.Constant) else None), value
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            yield keyword.arg, keyword.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                yield target.slice.value, node.value


def _constant(node: ast.expr) -> str | None:
    """The text of a constant, also in `str(…)` or `json.dumps(…)`; None for what is computed."""
    is_call = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
    if is_call and ast.unparse(node.func) == "json.dumps":  # type: ignore[attr-defined]
        node = node.args[0]  # type: ignore[attr-defined]
        try:
            return json.dumps(ast.literal_eval(node))
        except (ValueError, TypeError):
            return None
    if is_call:
        node = node.args[0]  # type: ignore[attr-defined]
    if not isinstance(node, ast.Constant) or node.value is None:
        return None
    return str(node.value).lower() if isinstance(node.value, bool) else str(node.value)
