"""Faults of a model.py that its text shows: found before the engine starts, without running it.

Only what runs at every import is judged: the statements of the module's own level.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_vllm.features.custom_code.functions import (
    HookError,
    check_input_parameters,
    check_output_parameters,
    is_for_tokens,
)
from lmi_vllm.features.custom_code.imports import DJL_PYTHON, MODULES, provided_names

_Function = ast.FunctionDef | ast.AsyncFunctionDef
REGISTER: Final = "register_adapter"
UNREGISTER: Final = "unregister_adapter"
UPDATE: Final = "update_adapter"
PREDICT: Final = "predict_fn"  # SageMaker's, with these parameters
PREDICT_PARAMETERS: Final = ("input_data", "model")
PREDICT_IN_VAIN: Final = (
    "predict_fn would never be called, since vLLM is the model: take it out, or write "
    "`async def handle(inputs)`, which answers instead of vLLM"
)
# Modules of LMI's built-in handlers: files that import them wrap a handler.
_HANDLERS: Final = (
    "huggingface", "tensorrt_llm", "deepspeed", "transformers_neuronx", "stable_diffusion",
    "fastertransformer", "rolling_batch", "chat_completions", "lmi_vllm", "lmi_trtllm",
    "huggingface_trtllm", "tensorrt_llm_python",
)  # fmt: skip
INSTEAD: Final = (
    "vLLM answers in the place of LMI's built-in handlers: put what the file changes in functions "
    "with @input_formatter and @output_formatter, and leave out `handle`, or let it return None"
)


class InspectionError(Exception):
    """A file would fail when it is imported or called; the text names file, line and reason."""


@dataclass(frozen=True, slots=True)
class InspectedFile:
    """A user's file, parsed and not executed."""

    path: Path
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> "InspectedFile":
        """Return the parsed file.

        Raises:
            OSError: it cannot be read.
            SyntaxError: it is not Python; a file with a null byte is a ValueError.
        """
        return cls(path, ast.parse(path.read_bytes(), str(path)))

    def check(self, handler: str, formatter: str | None, *, has_packages: bool) -> tuple[str, ...]:
        """Return warnings of functions that are never called.

        With `has_packages` missing modules are not judged: a requirements.txt may bring them.

        Raises:
            InspectionError: an import, or a signature, cannot work.
        """
        for reason in _missing_imports(self, {self.path}, has_packages=has_packages):
            raise InspectionError(reason)
        functions = {node.name: node for node in self.tree.body if isinstance(node, _Function)}
        for node in functions.values():
            self._check_signature(node, formatter)
        has_handler = handler in {*functions, *_assigned(self.tree)}
        predict = functions.get(PREDICT)
        if predict is not None and not has_handler and self._is_sagemaker(functions):
            raise InspectionError(f"{self.path}, line {predict.lineno}: {PREDICT_IN_VAIN}")
        return tuple(self._never_called(functions, handler, has_handler=has_handler))

    def _is_sagemaker(self, functions: dict[str, _Function]) -> bool:
        """Whether SageMaker's functions count: predict_fn has its parameters, none is decorated."""
        marks = {_last_name(mark) for node in functions.values() for mark in node.decorator_list}
        if marks & {"input_formatter", "output_formatter"}:
            return False
        return tuple(item.name for item in _parameters(functions[PREDICT])) == PREDICT_PARAMETERS

    def _check_signature(self, node: _Function, formatter: str | None) -> None:
        marks = {_last_name(decorator) for decorator in node.decorator_list}
        parameters = _parameters(node)
        try:
            if "input_formatter" in marks:
                check_input_parameters(node.name, parameters)
            is_output = "output_formatter" in marks or node.name == formatter
            if is_output and not is_for_tokens(parameters):
                check_output_parameters(node.name, parameters)
        except HookError as error:
            raise InspectionError(f"{self.path}, line {node.lineno}: {error}") from error

    def _never_called(
        self, functions: dict[str, _Function], handler: str, *, has_handler: bool
    ) -> Iterator[str]:
        names = (UPDATE,) if has_handler else (REGISTER, UNREGISTER, UPDATE)
        for name in names:
            if name in functions:
                reason = (
                    "the server updates adapters itself"
                    if has_handler
                    else f"the file has no {handler}, so the server's own handler is in use, which "
                    "needs no such function"
                )
                place = f"{self.path}, line {functions[name].lineno}"
                yield f"{place}: {name} is never called: {reason}"

    @property
    def values_of_next(self) -> int:
        """How many values the file unpacks from `get_next_token()`: 4, or 3 as documented."""
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and _last_name(node.value.func) == "get_next_token"
                and isinstance(target := node.targets[0], ast.Tuple | ast.List)
            ):
                return len(target.elts)
        return 3


def _missing_imports(file: InspectedFile, seen: set[Path], *, has_packages: bool) -> Iterator[str]:
    """Yield why each import of the file, or of a file beside it that it imports, cannot work."""
    for node in file.tree.body:
        for module, names in _imported(node):
            reason = _import_fault(file.path.parent, module, names, has_packages=has_packages)
            if reason:
                yield f"{file.path}, line {node.lineno}: {reason}"
            beside = (file.path.parent / module.replace(".", "/")).with_suffix(".py")
            if beside in seen or not beside.is_file():
                continue
            seen.add(beside)
            try:
                other = InspectedFile.read(beside)
            except (OSError, SyntaxError, ValueError):
                continue  # its import says why
            yield from _missing_imports(other, seen, has_packages=has_packages)


def _imported(node: ast.stmt) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules of an import statement, with the names that are taken from them."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        yield node.module, tuple(alias.name for alias in node.names if alias.name != "*")


def _import_fault(
    folder: Path, module: str, names: tuple[str, ...], *, has_packages: bool
) -> str | None:
    root = module.partition(".")[0]
    if root == DJL_PYTHON:
        return _djl_python_fault(module, names)
    is_beside = (folder / f"{root}.py").is_file() or (folder / root).is_dir()
    if is_beside or has_packages or root in sys.builtin_module_names or root in sys.modules:
        return None
    if root in sys.stdlib_module_names or importlib.util.find_spec(root) is not None:
        return None
    return f"No module named {root!r}: put it into requirements.txt, or beside the file"


def _djl_python_fault(module: str, names: tuple[str, ...]) -> str | None:
    """Return why LMI's names cannot be imported here."""
    inner = module.partition(".")[2]
    wanted = (inner,) if inner else names
    for name in wanted:
        if name.partition(".")[0] in _HANDLERS:
            return f"No module named '{DJL_PYTHON}.{name}': {INSTEAD}"
    if inner and inner not in MODULES:
        known = ", ".join(sorted(MODULES))
        return f"No module named '{module}'; {DJL_PYTHON} has {known} here"
    if missing := sorted({*names} - provided_names(inner)):
        return f"cannot import name {missing[0]!r} from '{module}': this server does not have it"
    return None


def _assigned(tree: ast.Module) -> Iterator[str]:
    """Yield names that the module's own statements bind without `def`."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def _last_name(node: ast.expr) -> str:
    """Return `c` for `a.b.c`, with or without a call."""
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _parameters(node: _Function) -> list[inspect.Parameter]:
    """Return the parameters of a function as `inspect.signature` would."""
    given, empty = node.args, inspect.Parameter.empty
    kinds = inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    found = []
    for place, argument in enumerate(positional):
        kind = (
            kinds.POSITIONAL_ONLY if place < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        )
        default = empty if place < first_default else None
        annotation = ast.unparse(argument.annotation) if argument.annotation else empty
        found.append(kinds(argument.arg, kind, default=default, annotation=annotation))
    if given.vararg:
        found.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        default = empty if value is None else None
        found.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=default))
    if given.kwarg:
        found.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return found
