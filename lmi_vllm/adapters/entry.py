"""One registered adapter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.inference.hooks.functions import NO_HOOKS, Hooks
from lmi_vllm.messages import AdapterRef


@dataclass(frozen=True, slots=True)
class Adapter:
    """A registered adapter: `src` as given, `path` on disk; preload and pin as requested.

    `ref` is there while its weights are loaded; `hooks` are those of its own model.py. `options`
    are the other parameters of its registration, kept and otherwise unused. Adapters found in the
    model directory are `is_local`: they come back by themselves at the next start.
    """

    name: str
    src: str
    preload: bool = True
    pin: bool = False
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    is_local: bool = False
    path: str = ""
    ref: AdapterRef | None = None
    hooks: Hooks = NO_HOOKS


@dataclass(frozen=True, slots=True)
class Lease:
    """What a request holds of the adapter it named: one load of its weights, and its hooks."""

    ref: AdapterRef | None = None
    hooks: Hooks = NO_HOOKS


def check_flags(adapter: Adapter) -> None:
    """Return when the flags go together.

    Raises:
        AdapterRefusedError: it is to be pinned, but not loaded.
    """
    if adapter.pin and not adapter.preload:
        raise AdapterRefusedError(
            f"Adapter {adapter.name}: pin=true needs preload=true; it is impossible to pin an "
            "adapter that is not loaded"
        )
