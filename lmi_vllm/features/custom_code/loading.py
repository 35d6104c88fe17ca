"""Import a user's file and find the hooks in it.

The model's own file is imported as LMI does: its folder is the working directory and first on the
Python path. An adapter's file is kept apart: see `imports`.
"""

import importlib.machinery
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from lmi_vllm.adapters.source import CODE_FILE
from lmi_vllm.features.custom_code.djl_python.formatting import (
    INIT_HANDLER,
    INPUT_FORMATTER,
    OUTPUT_FORMATTER,
    PREDICTION_HANDLER,
)
from lmi_vllm.features.custom_code.functions import (
    AdapterFunctions,
    FileFunctions,
    HookError,
    InputFunction,
    OutputFunction,
    TokenFunction,
)
from lmi_vllm.features.custom_code.imports import PrivateModules, SourceLoader, provide_djl_python
from lmi_vllm.features.custom_code.inspection import (
    PREDICT,
    PREDICT_IN_VAIN,
    PREDICT_PARAMETERS,
    REGISTER,
    UNREGISTER,
    InspectedFile,
    InspectionError,
)

logger = logging.getLogger(__name__)

_OTHER_NAME: Final = "lmi_vllm_custom_{}"  # where another module has that of the file

# SageMaker's four functions, for files without a decorated one, and the parameter names that each
# must have, exactly: anything else is the user's own function.
_SAGEMAKER: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = MappingProxyType(
    {
        "input_fn": (("request_body", "content_type"), ("request_body", "request_content_type")),
        "output_fn": (("prediction", "accept"), ("prediction", "response_content_type")),
        "model_fn": (("model_dir",),),
        PREDICT: (PREDICT_PARAMETERS,),
    }
)


class CodeError(Exception):
    """A file of the user's cannot be loaded; the text names file, line and reason."""


def inspect_code(
    path: Path, handler: str, formatter: str | None, *, has_packages: bool = False
) -> tuple[str, ...]:
    """Return warnings of what the file has in vain, without executing it.

    With `has_packages` a requirements.txt may still bring what it imports.

    Raises:
        CodeError: it cannot be read, is not Python, or imports or defines what cannot work.
    """
    try:
        return InspectedFile.read(path).check(handler, formatter, has_packages=has_packages)
    except (OSError, SyntaxError, ValueError) as error:
        raise CodeError(_described(path, error)) from error
    except InspectionError as error:
        raise CodeError(str(error)) from error


def load_model_code(path: Path, handler: str, formatter: str | None) -> FileFunctions:
    """Return the functions of the model's own file; `formatter` names its output hook if set.

    Raises:
        CodeError: the file cannot be imported, or a function has a signature that cannot be called.
    """
    _prepare_imports()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    os.chdir(folder)
    name = path.stem if path.stem not in sys.modules else _OTHER_NAME.format(path.stem)
    module = _imported(name, path)
    handle = getattr(module, handler, None)
    return _functions(path, module, handle if callable(handle) else None, formatter)


def imported_from(path: Path) -> ModuleType | None:
    """Return the module that the model's own file was imported as."""
    names = (path.stem, _OTHER_NAME.format(path.stem))
    found = (module for name in names if (module := sys.modules.get(name)) is not None)
    return next(
        (module for module in found if getattr(module, "__file__", None) == str(path)), None
    )


def load_adapter_code(folder: Path) -> FileFunctions:
    """Return the input and output hooks of an adapter's own file.

    Raises:
        CodeError: as `load_model_code`.
    """
    _prepare_imports()
    path = folder / CODE_FILE
    modules = PrivateModules(folder)
    try:
        module = modules.load(path.stem)
        return replace(_functions(path, module, None, None), forget=modules.forget)
    except CodeError:
        modules.forget()
        raise
    except (Exception, SystemExit) as error:
        modules.forget()
        raise CodeError(_described(path, error)) from error


def _prepare_imports() -> None:
    """Provide `djl_python`, and write no bytecode: the folder may be read-only."""
    sys.dont_write_bytecode = True
    provide_djl_python()


def _imported(name: str, path: Path) -> ModuleType:
    loader = SourceLoader(name, str(path))
    spec = importlib.machinery.ModuleSpec(name, loader, origin=str(path))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise CodeError(_described(path, error)) from error
    return module


def _functions(path: Path, module: ModuleType, handle: Any, formatter: str | None) -> FileFunctions:
    for mark in (PREDICTION_HANDLER, INIT_HANDLER):
        if (unused := _marked(path, module, mark)) is not None:
            logger.warning("%s: %s has no effect with vLLM", path, unused.__name__)
    to_input, to_output = (_marked(path, module, m) for m in (INPUT_FORMATTER, OUTPUT_FORMATTER))
    named = getattr(module, formatter, None) if formatter else None
    if callable(named):
        to_output = named
    try:
        if to_input is None and to_output is None:
            found = _sagemaker_functions(path, module, has_handle=handle is not None)
        else:
            found = _output_functions(path, to_output)
            if to_input is not None:
                found = replace(found, input=InputFunction.of(to_input))
    except HookError as error:
        raise CodeError(f"{path}: {error}") from error
    return replace(found, handle=handle, adapters=_adapter_functions(module, handle))


def _output_functions(path: Path, function: Any) -> FileFunctions:
    """Return an output formatter: of today's signature, or of LMI's rolling batch."""
    if function is None:
        return FileFunctions()
    tokens = TokenFunction.of(function, InspectedFile.read(path).values_of_next)
    if tokens is not None:
        return FileFunctions(tokens=tokens)
    return FileFunctions(output=OutputFunction.of(function))


def _adapter_functions(module: ModuleType, handle: Any) -> AdapterFunctions:
    """Return what the file does about adapters, where it answers requests itself."""
    if handle is None:
        return AdapterFunctions()
    names = (REGISTER, UNREGISTER)
    found = [found if callable(found := getattr(module, name, None)) else None for name in names]
    return AdapterFunctions(*found)


def _marked(path: Path, module: ModuleType, mark: str) -> Any:
    found = [
        value
        for value in vars(module).values()
        if callable(value) and getattr(value, mark, None) is True
    ]
    if len({id(value) for value in found}) > 1:
        names = ", ".join(value.__name__ for value in found)
        logger.warning(
            "%s: several functions are marked %s (%s); the first counts", path, mark, names
        )
    return found[0] if found else None


def _described(path: Path, error: BaseException) -> str:
    """Return file, line and reason; the traceback goes to the log."""
    logger.error("%s cannot be loaded", path, exc_info=error)
    if isinstance(error, SyntaxError):
        return f"{path}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == path
    ]
    place = f"{path}, line {lines[-1]}" if lines else str(path)
    return f"{place}: {type(error).__name__}: {reason}"


def _sagemaker_functions(
    path: Path, module: ModuleType, *, has_handle: bool = False
) -> FileFunctions:
    """Return `input_fn` and `output_fn` as hooks; vLLM takes the place of SageMaker's other two.

    With a `handle` the file answers by itself and may call its `predict_fn` and `model_fn`.

    Raises:
        HookError: there is a `predict_fn`, which would silently never be called.
    """
    functions = {name: function for name in _SAGEMAKER if (function := _of_sagemaker(module, name))}
    if PREDICT in functions and not has_handle:
        raise HookError(PREDICT_IN_VAIN)
    if "model_fn" in functions and not has_handle:
        logger.warning("%s: model_fn has no effect: vLLM loads the model", path)
    return FileFunctions(
        input=InputFunction.of(functions["input_fn"], is_sagemaker=True)
        if "input_fn" in functions
        else None,
        output=OutputFunction.of(functions["output_fn"], is_sagemaker=True)
        if "output_fn" in functions
        else None,
    )


def _of_sagemaker(module: ModuleType, name: str) -> Any:
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        return None
    names = tuple(inspect.signature(function).parameters)
    return function if names in _SAGEMAKER[name] else None
