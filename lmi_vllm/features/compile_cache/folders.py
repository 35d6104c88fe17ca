"""Where the engine's libraries keep code that they run again: folders of this user alone.

torch's default is `torchinductor_<user>` below the temporary directory, CuTe's and QuACK's is
`<user>` there: names that every user of the machine knows, and code that another has put there
would be run. The folders here are the same at each start: what was compiled is found again.
"""

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.platform import cache_folder
from lmi_vllm.sources.trusted_folders import trusted_folder, untrusted_folder_reason

logger = logging.getLogger(__name__)

VLLM: Final = "VLLM_CACHE_ROOT"
OURS: Final = "lmi_vllm"  # our folder in vLLM's
# Each library's own folder in ours; one that is set stays as it is.
_FOLDERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "CUTE_DSL_CACHE_DIR": "cute_dsl",
        "QUACK_CACHE_DIR": "quack",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
    }
)
# Where other libraries keep theirs: below the first of these folders that is set. It stays there
# where that is safe, since an image may bring it; where others could put some, it moves to ours.
_USUAL: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "FLASHINFER_WORKSPACE_BASE": ("HOME/.cache/flashinfer",),
        "CUDA_CACHE_PATH": ("HOME/.nv/ComputeCache",),
        "TVM_FFI_CACHE_DIR": ("HOME/.cache/tvm-ffi",),
        "TRTLLM_DG_CACHE_DIR": ("HOME/.tensorrt_llm",),
        "TILELANG_CACHE_DIR": ("HOME/.tilelang/cache",),
        "HUMMING_CACHE_DIR": ("HOME/.humming/cache",),
        "CUPY_CACHE_DIR": ("HOME/.cupy/kernel_cache",),
        "NUMBA_CACHE_DIR": ("XDG_CACHE_HOME/numba", "HOME/.cache/numba"),
        "TORCH_EXTENSIONS_DIR": (
            "XDG_CACHE_HOME/torch_extensions",
            "HOME/.cache/torch_extensions",
        ),
        "HF_MODULES_CACHE": (
            "HF_HOME/modules",
            "XDG_CACHE_HOME/huggingface/modules",
            "HOME/.cache/huggingface/modules",
        ),
    }
)
_BELOW_VLLM: Final = "DG_JIT_CACHE_DIR"  # DeepGEMM's, which vLLM keeps in its own unless it is set
_WHAT: Final = "compiled code"


def compiled_code_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of vLLM's caches: as it is set, else the usual one where that is safe.

    Raises:
        StartupError: there is no safe folder; the text says what to set.
    """
    try:
        usual = cache_folder(VLLM, environ).absolute()
    except RuntimeError:  # neither HOME nor an entry of this user
        usual = _private()
    return usual if environ.get(VLLM) else trusted_folder(usual, _private(), _WHAT, VLLM)


def compiled_code_exports(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that lead vLLM and its libraries to folders of this user alone.

    What the user has set is not replaced; a folder there that others can change is a warning.

    Raises:
        StartupError: there is no safe folder; the text says what to set.
    """
    for variable in (VLLM, _BELOW_VLLM, *_FOLDERS, *_USUAL):
        folder = environ.get(variable)
        if folder and (reason := untrusted_folder_reason(Path(folder).expanduser(), _WHAT)):
            logger.warning("%s=%s, whose code is run: %s", variable, folder, reason)
    root = compiled_code_folder(environ)
    exports = {} if environ.get(VLLM) else {VLLM: str(root)}
    for variable, name in _FOLDERS.items():
        if not environ.get(variable):
            usual, other = root / OURS / name, _private() / name
            exports[variable] = str(trusted_folder(usual, other, _WHAT, variable))
    return exports | _moved(environ, root / OURS)


def _moved(environ: Mapping[str, str], ours: Path) -> dict[str, str]:
    """Return the variables of libraries whose usual folder others could make or change."""
    reasons = {
        variable: reason
        for variable, places in _USUAL.items()
        if not environ.get(variable) and (reason := _unsafe_reason(places, environ))
    }
    if reasons:
        names = ", ".join(reasons)
        text = "%s: %s is used for code that libraries keep; %s choose other folders"
        logger.warning(text, "; ".join(dict.fromkeys(reasons.values())), ours, names)
    return {variable: str(ours / variable.lower()) for variable in reasons}


def _unsafe_reason(places: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Return why others could put code in the first of these places whose folder is set."""
    for place in places:
        variable, _, name = place.partition("/")
        above = environ.get(variable) or (_home() if variable == "HOME" else "")
        if Path(above).is_absolute():
            usual = Path(above, name)
            # It is not made: most libraries never need theirs.
            existing = next(path for path in (usual, *usual.parents) if os.path.lexists(path))
            return untrusted_folder_reason(existing, _WHAT)
    return "this user has no HOME"


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:
        return ""


def _private() -> Path:
    """The folder of this user below the temporary directory, by a name that it can find again."""
    return Path(tempfile.gettempdir()) / f"lmi-vllm-cache-{os.geteuid()}"
