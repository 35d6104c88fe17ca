"""SageMaker's four functions, for files without a decorated one (http-api.md 11)."""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from lmi_vllm.hooks.functions import Hooks, InputHook, OutputHook

logger = logging.getLogger(__name__)

# Function -> the parameter names it must have, exactly: anything else is somebody's own function.
_SIGNATURES: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = MappingProxyType(
    {
        "input_fn": (("request_body", "content_type"), ("request_body", "request_content_type")),
        "output_fn": (("prediction", "accept"), ("prediction", "response_content_type")),
        "model_fn": (("model_dir",),),
        "predict_fn": (("input_data", "model"),),
    }
)
_UNUSED: Final = ("model_fn", "predict_fn")


def sagemaker_hooks(path: Path, module: ModuleType) -> Hooks:
    """Return `input_fn` and `output_fn` as hooks; the other two have nothing to do with vLLM."""
    found = {name: function for name in _SIGNATURES if (function := _function(module, name))}
    if unused := [name for name in _UNUSED if name in found]:
        logger.warning("%s: %s have no effect: vLLM is the model", path, " and ".join(unused))
    return Hooks(
        input=InputHook.of(found["input_fn"], is_sagemaker=True) if "input_fn" in found else None,
        output=OutputHook.of(found["output_fn"], is_sagemaker=True)
        if "output_fn" in found
        else None,
    )


def _function(module: ModuleType, name: str) -> Any:
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        return None
    names = tuple(inspect.signature(function).parameters)
    return function if names in _SIGNATURES[name] else None
