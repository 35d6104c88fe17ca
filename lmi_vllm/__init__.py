"""One process, one model, one port: an LMI-compatible server on vLLM.

`__all__` is the public interface. Each name is imported when it is first used, so that `import
lmi_vllm` is cheap and needs no vLLM.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from lmi_vllm._version import __version__

if TYPE_CHECKING:
    from lmi_vllm.assembly import create_app, load_settings
    from lmi_vllm.config.settings import Settings
    from lmi_vllm.engine.base import Engine
    from lmi_vllm.errors import LmiError
    from lmi_vllm.inference.context import Runtime
    from lmi_vllm.inference.service import InferenceService
    from lmi_vllm.messages import ServingProfile
    from lmi_vllm.web.request import WebOptions

__all__ = [
    "Engine",
    "InferenceService",
    "LmiError",
    "Runtime",
    "ServingProfile",
    "Settings",
    "WebOptions",
    "__version__",
    "create_app",
    "load_settings",
]

_HOMES: Final = MappingProxyType(
    {
        "Engine": "lmi_vllm.engine.base",
        "InferenceService": "lmi_vllm.inference.service",
        "LmiError": "lmi_vllm.errors",
        "Runtime": "lmi_vllm.inference.context",
        "ServingProfile": "lmi_vllm.messages",
        "Settings": "lmi_vllm.config.settings",
        "WebOptions": "lmi_vllm.web.request",
        "create_app": "lmi_vllm.assembly",
        "load_settings": "lmi_vllm.assembly",
    }
)


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first asked for (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
