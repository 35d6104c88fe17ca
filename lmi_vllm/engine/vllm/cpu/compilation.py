"""On a CPU, vLLM and torch compile and load again what is there, or while every stream waits.

`uncompiled` (DECISIONS.md 52): vLLM compiles `batched_count_greater_than`, three tensor operations,
with a C++ compiler at the first request that asks for log probabilities of more than one token.

`in_this_process` (DECISIONS.md 8): vLLM looks at a model class in a new process, so as not to
initialise CUDA. Without CUDA the class is wanted here anyhow before the engine is forked.

`kept_headers`, `kept_header_locks` (DECISIONS.md 61): torch keeps Inductor's precompiled C++ header
below /tmp and not where TORCHINDUCTOR_CACHE_DIR says, and makes it again in each container.

`nothing_to_finalize`: vLLM calls `finalize_loading` on compiled code that it reads from the disk,
which only its own backend's code has. On a CPU the code is torch's, complete once it is read.

`names_of`: vLLM puts its CPU kernels in the place of Triton's in every module that is imported, and
reads the names of each object there. Some have none that can be read (llvmlite's, which numba and
librosa import). With those in `model.py`, an engine that had died could not be forked again.

`Kernels`: most of those modules are of libraries that never have a kernel of vLLM's. To read a name
writes to the object's count of references, so a forked engine copies the page that it is on.

Upstream: https://github.com/torch-spyre/sendnn-inference/issues/550 (the first),
    vllm-project/vllm/issues/19317 (the second), pytorch/pytorch/pull/144002 (where the header came
    from); the last two are not reported that we know of.
Releases: 0.31 and later, with torch 2.13.
Shows: every stream stands still for 5 to 25 s; a start is 11, 6.5 and some more seconds longer, or
    ends with "'_lib_fn_wrapper' object has no attribute 'get'". Each engine has 79 MB more.
May go: each when its test fails, in the order of the rows:
    test_plain_vllm_compiles_a_function_while_it_serves,
    test_plain_vllm_starts_a_process_to_inspect_a_model_class,
    test_plain_torch_keeps_its_headers_beside_the_cache,
    test_plain_torch_has_no_finalize_loading_that_vllm_calls,
    test_plain_vllm_reads_the_names_of_any_object,
    test_plain_vllm_looks_for_its_kernels_in_every_library.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

# Libraries that vLLM imports and that do not import vLLM: those with most names, and Python's own.
WITHOUT_KERNELS: Final = sys.stdlib_module_names | {
    "aiohttp", "boto3", "botocore", "cv2", "fastapi", "functorch", "google", "grpc",
    "huggingface_hub", "jinja2", "mpmath", "networkx", "numpy", "openai", "opentelemetry",
    "pydantic", "pydantic_core", "requests", "setuptools", "starlette", "sympy", "torch",
    "torchgen", "transformers", "triton", "urllib3", "zmq",
}  # fmt: skip
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


def names_of(_: object) -> Callable[[object], Mapping[str, Any]]:
    """Return what reads the names of an object, none where they cannot be read."""

    def read(value: object) -> Mapping[str, Any]:
        """As the builtin `vars`, but without asking the object, whatever it would answer."""
        try:
            names: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return {}
        return names

    return read


class Kernels:
    """Python's `sys`, with those modules alone that may have a kernel of vLLM's."""

    def __init__(self, _: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)

    @property
    def modules(self) -> dict[str, ModuleType]:
        """The modules of vLLM, of its plug-ins, ours and an operator's."""
        loaded = list(sys.modules.items())
        return {name: one for name, one in loaded if name.split(".", 1)[0] not in WITHOUT_KERNELS}
