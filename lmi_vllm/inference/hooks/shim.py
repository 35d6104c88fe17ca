"""Make `djl_python` importable for hooks: our package under that name, and only when needed."""

import importlib
import importlib.machinery
import logging
import sys
from typing import Final

logger = logging.getLogger(__name__)

NAME: Final = "djl_python"
_OURS: Final = "lmi_vllm.inference.hooks.djl_python"
_MODULES: Final = (
    "async_utils",
    "encode_decode",
    "input_parser",
    "inputs",
    "output_formatter",
    "outputs",
    "pair_list",
    "request_io",
)


def provide_djl_python() -> None:
    """Put our package under the name that hooks import; a real one is never hidden silently."""
    ours = importlib.import_module(_OURS)
    if sys.modules.get(NAME) is ours:
        return
    real = importlib.machinery.PathFinder.find_spec(NAME)
    if real is not None:
        logger.warning(
            "%s is installed at %s; hooks get this server's own %s instead (%s)",
            NAME,
            real.origin or real.submodule_search_locations,
            NAME,
            ", ".join(_MODULES),
        )
    sys.modules[NAME] = ours
    for name in _MODULES:
        sys.modules[f"{NAME}.{name}"] = importlib.import_module(f"{_OURS}.{name}")
