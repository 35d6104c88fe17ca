"""Hooks of a registry that a test makes before what its hooks are about."""

from dataclasses import replace
from typing import Any

from lmi_vllm.adapters.registry import AdapterRegistry


def hook(registry: AdapterRegistry, **hooks: Any) -> None:
    """Have the registry call these hooks, in the place of those that it was made with."""
    registry.hooks = replace(registry.hooks, **hooks)
