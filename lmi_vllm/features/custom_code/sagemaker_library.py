"""What a model's code says to SageMaker's library in vLLM's application: handlers and middleware.

`vllm serve` lets the library (`model_hosting_container_standards`) import that code. Here it is
imported by this feature, where it may run, and the library is called with what came of that.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lmi_vllm.engine.base import Engine
from lmi_vllm.features.custom_code.loading import imported_from
from lmi_vllm.server.code_start import HANDLERS, warn_of_handlers

LIBRARY: Final = "model_hosting_container_standards"
_FUNCTIONS: Final = ("custom_sagemaker_ping_handler", "custom_sagemaker_invocation_handler")
_NO_APPLICATION: Final = "the engine has no HTTP application of vLLM's"


def hand_over(
    engine: Engine, path: Path | None, folder: Path | None, environ: Mapping[str, str]
) -> None:
    """Have the library put the code of `path`, or what the variables name, into the application."""
    module = None if path is None else imported_from(path)
    is_named = any(name.startswith(HANDLERS) for name in environ)
    if not is_named and not is_for_library(module):
        return
    if engine.http is None:
        warn_of_handlers(environ, _NO_APPLICATION)
        return
    engine.http.change(lambda app: _bootstrap(app, path, folder, module))


def is_for_library(module: Any) -> bool:
    """Whether a file has functions that the library looks for, or uses its decorators."""
    if module is None:
        return False
    if any(callable(getattr(module, name, None)) for name in _FUNCTIONS):
        return True
    return any(
        str(getattr(value, name, "")).startswith(LIBRARY)
        for value in vars(module).values()
        for name in ("__module__", "__name__")
    )


def _bootstrap(app: Any, path: Path | None, folder: Path | None, module: Any) -> None:
    from model_hosting_container_standards import sagemaker  # noqa: PLC0415 (a part of vLLM's)
    from model_hosting_container_standards.common.custom_code_ref_resolver import (  # noqa: PLC0415
        function_loader,
    )
    from model_hosting_container_standards.common.fastapi.middleware import (  # noqa: PLC0415
        registry,
    )

    aliases = {} if path is None else {"model": str(path)}
    loader = function_loader.FunctionLoader([str(folder or Path.cwd())], aliases)
    if path is not None and module is not None:  # imported before: not a second time
        loader._module_cache[f"file:{path.resolve()}"] = module
    sagemaker.SageMakerFunctionLoader._default_function_loader = loader
    registry.middleware_registry.clear_middlewares()  # of an engine before this one
    sagemaker.bootstrap(app)
