"""What keeps a CPU engine from using compiled code that is there; a later release may do without.

Called before the engine forks, which inherits it. Where a name has moved, a start costs the seconds
that it costs with vLLM alone.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def use_what_is_compiled(folder: str | None) -> None:
    """Let the next engine load what an earlier one has compiled; `folder` is Inductor's cache."""
    _keep_precompiled_headers(folder)
    _complete_loaded_code()


def _keep_precompiled_headers(folder: str | None) -> None:
    """Let Inductor keep its precompiled C++ header where TORCHINDUCTOR_CACHE_DIR says.

    torch 2.13 keeps it below /tmp all the same, and makes it again in each container (6.5 s), also
    where nothing is left to compile.
    """
    codecache: Any = sys.modules.get("torch._inductor.codecache")
    if folder and hasattr(codecache, "_HEADER_DIR"):
        headers = Path(folder) / "precompiled_headers"
        codecache._HEADER_DIR = str(headers)
        codecache._HEADER_LOCK_DIR = str(headers / "locks")


def _complete_loaded_code() -> None:
    """Give compiled code read from the disk the method that vLLM calls on it.

    vLLM 0.32 calls `finalize_loading`, which only its own backend's code has. On a CPU the code is
    torch's, which is complete once it is read: the missing name made vLLM compile it again.
    """
    try:
        types: Any = importlib.import_module("torch._dynamo.aot_compile_types")
    except ImportError:
        return
    code = getattr(types, "BundledAOTAutogradSerializableCallable", None)
    if code is not None and "finalize_loading" not in vars(code):
        code.finalize_loading = _nothing_to_finalize


def _nothing_to_finalize(code: object, config: object) -> None:
    """Stand for `finalize_loading` of code that is complete."""
