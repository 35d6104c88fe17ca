"""On a CPU, vLLM and torch compile and load again what is there, or while every stream waits.

`uncompiled` (DECISIONS.md 52): the first request that asks for log probabilities of more than the
sampled token makes vLLM compile `batched_count_greater_than` with a C++ compiler: 5 to 25 s in
which every stream stands still. It is three tensor operations, and stays uncompiled.

`in_this_process` (DECISIONS.md 8): vLLM looks at a model class in a new process, so as not to
initialise CUDA: 11 s for a new class. Without CUDA there is no such reason, and the class is wanted
here anyhow before the engine is forked.

`kept_headers`, `kept_header_locks` (DECISIONS.md 61): torch keeps Inductor's precompiled C++ header
below /tmp and not where TORCHINDUCTOR_CACHE_DIR says, and makes it again in each container (6.5 s),
also where nothing is left to compile. Seen with torch 2.13.

`nothing_to_finalize`: vLLM calls `finalize_loading` on compiled code that it reads from the disk,
which only its own backend's code has. On a CPU the code is torch's, which is complete once it is
read: the missing name makes vLLM compile it again. Seen with vLLM 0.32, and 0.33 calls it, too.

All but the first cost only seconds of a start: where a name has moved, they are passed over.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch's


def uncompiled(compiled: Any) -> Any:
    """Return the function that was compiled."""
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)


def in_this_process(_: object) -> Callable[[Callable[[], Any]], Any]:
    """Return what calls a function here and not in another process."""
    return lambda function: function()


def kept_headers(folder: str) -> str:
    """Return the folder of precompiled headers below Inductor's cache; torch's without one."""
    cache = os.environ.get(CACHE_VARIABLE)
    return str(Path(cache) / "precompiled_headers") if cache else folder


def kept_header_locks(folder: str) -> str:
    """Return the folder of their locks."""
    cache = os.environ.get(CACHE_VARIABLE)
    return str(Path(cache) / "precompiled_headers" / "locks") if cache else folder


def nothing_to_finalize(_: object) -> Callable[[object, object], None]:
    """Return a `finalize_loading` for code that is complete."""

    def finalize_loading(_code: object, _config: object) -> None:
        """Do nothing."""

    return finalize_loading
