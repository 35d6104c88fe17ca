"""SageMaker's four functions, for files without a decorated one."""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from lmi_vllm.inference.hooks.functions import HookError, Hooks, InputHook, OutputHook

logger = logging.getLogger(__name__)

# Function -> the parameter names it must have, exactly: anything else is the user's own function.
_SIGNATURES: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = MappingProxyType(
    {
        "input_fn": (("request_body", "content_type"), ("request_body", "request_content_type")),
        "output_fn": (("prediction", "accept"), ("prediction", "response_content_type")),
        "model_fn": (("model_dir",),),
        "predict_fn": (("input_data", "model"),),
    }
)


def sagemaker_hooks(path: Path, module: ModuleType, *, has_handle: bool = False) -> Hooks:
    """Return `input_fn` and `output_fn` as hooks; vLLM takes the place of the other two.

    With a `handle` the file answers by itself, and whatever else is in it is its own business.

    Raises:
        HookError: there is a `predict_fn`: answers that it never saw would be taken for its own.
    """
    found = {name: function for name in _SIGNATURES if (function := _function(module, name))}
    if "predict_fn" in found and not has_handle:
        raise HookError(
            "predict_fn would never be called, since vLLM is the model: take it out, or write "
            "`async def handle(inputs)`, which answers instead of vLLM"
        )
    if "model_fn" in found and not has_handle:
        logger.warning("%s: model_fn has no effect: vLLM loads the model", path)
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
