"""A class of ours joined with an operator's: vLLM takes one name, which here says both.

vLLM looks a name up in the module that stands before its last dot: that module of ours answers with
`joined_class` where it has no such name. This module imports no vLLM.
"""

import functools
import importlib
from typing import Final

BESIDE: Final = "|"  # stands for dots: what follows the last dot is looked up in our module


def joined_name(ours: str, other: str) -> str:
    """Return the name of our class, joined with `other` unless that is empty."""
    return f"{ours}{BESIDE}{other.replace('.', BESIDE)}" if other else ours


@functools.cache  # a worker compares classes
def joined_class(ours: type, name: str) -> type:
    """Return our class joined with the one that the rest of `name` says.

    Raises:
        AttributeError: the name begins with another than that of our class.
    """
    first, is_both, others = name.partition(BESIDE)
    if not is_both or first != ours.__name__:
        raise AttributeError(f"module {ours.__module__} has no attribute {name}")
    module, _, qualified = others.replace(BESIDE, ".").rpartition(".")
    other = getattr(importlib.import_module(module), qualified)
    return type(name, (ours, other), {})
