"""Where the engine's libraries keep what they compile and run again: folders of this user alone.

torch's default is `torchinductor_<user>` below the temporary directory, a name that every user of
the machine knows: code that another one has put there would be run. The folders here are the same
at each start, so that what was compiled is found again.
"""

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.platform import vllm_cache_folder
from lmi_vllm.sources.trusted_folders import trusted_folder, untrusted_folder_reason

logger = logging.getLogger(__name__)

VLLM: Final = "VLLM_CACHE_ROOT"
OURS: Final = "lmi_vllm"  # our folder in vLLM's
# torch's and Triton's own folder in ours; one that is set stays as it is.
_FOLDERS: Final[Mapping[str, str]] = MappingProxyType(
    {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
)
_WHAT: Final = "compiled code"


def compiled_code_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of vLLM's caches: as it is set, else the usual one where that is safe.

    Raises:
        StartupError: there is no safe folder; the text says what to set.
    """
    usual = vllm_cache_folder(environ)
    return usual if environ.get(VLLM) else trusted_folder(usual, _private(), _WHAT, VLLM)


def compiled_code_exports(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that lead vLLM, torch and Triton to folders of this user alone.

    What the user has set is not replaced; a folder there that others can change is a warning.

    Raises:
        StartupError: there is no safe folder; the text says what to set.
    """
    for variable in (VLLM, *_FOLDERS):
        folder = environ.get(variable)
        if folder and (reason := untrusted_folder_reason(Path(folder).expanduser(), _WHAT)):
            logger.warning("%s=%s, whose code is run: %s", variable, folder, reason)
    root = compiled_code_folder(environ)
    found = {} if root == vllm_cache_folder(environ) else {VLLM: str(root)}
    for variable, name in _FOLDERS.items():
        if not environ.get(variable):
            usual, other = root / OURS / name, _private() / name
            found[variable] = str(trusted_folder(usual, other, _WHAT, variable))
    return found


def _private() -> Path:
    """The folder of this user below the temporary directory, by a name that it can find again."""
    return Path(tempfile.gettempdir()) / f"lmi-vllm-cache-{os.geteuid()}"
