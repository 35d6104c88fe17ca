"""Make `djl_python` importable for hooks: our package under that name, and only when needed."""

import importlib
import importlib.machinery
import logging
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

logger = logging.getLogger(__name__)

NAME: Final = "djl_python"
_OURS: Final = "lmi_vllm.extras.djl_python.names"
_OF_THE_CORE: Final = "lmi_vllm.inference.hooks"
_MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("inputs", "outputs", "pair_list"), _OF_THE_CORE),
        **dict.fromkeys(
            ("async_utils", "encode_decode", "input_parser", "output_formatter", "request_io"),
            _OURS,
        ),
    }
)


def provide() -> None:
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
            ", ".join(sorted(_MODULES)),
        )
    sys.modules[NAME] = ours
    for name, place in _MODULES.items():
        sys.modules[f"{NAME}.{name}"] = importlib.import_module(f"{place}.{name}")
