"""The environment variables that a start sets for LMCache's library."""

import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.lmcache.rules import LmcacheSettings
from lmi_vllm.host_memory import free_host_memory
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.sources.trusted_folders import per_user_sibling, trusted_folder

logger = logging.getLogger(__name__)

CACHE_FOLDER: Final = Path("/tmp/lmcache")
_PREFIX: Final = "LMCACHE_"
_GIB: Final = 1 << 30
_RESERVED_SHARE: Final = 0.2
_RESERVED_MODELS: Final = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """The input of the automatic sizes, in bytes: free memory, and all of /tmp's file system."""

    memory: int
    disk: int


def lmcache_variables(
    settings: Settings,
    model: ModelArtifacts,
    arguments: EngineArguments,
    environ: Mapping[str, str],
    machine: Machine | None = None,
) -> dict[str, str]:
    """Return the variables for LMCache's library; none where no option asks for it.

    Raises:
        ConfigurationError: the configuration file is missing, or the model's size is unknown.
    """
    variables = _of_file(settings, model)
    asked = settings.feature(LmcacheSettings)
    if asked.lmcache_auto_config:
        auto = asked.details.lmcache_auto_config
        size = _model_bytes(Path(model.model))
        if not size:
            raise ConfigurationError(
                [
                    f"{auto.label} needs the size of the model, and {model.model} holds no "
                    "safetensors or bin weights: use option.lmcache_config_file"
                ]
            )
        ranks = arguments.number("tensor_parallel_size", 1)
        variables |= _automatic(size, ranks, machine or measure_machine())
    for name, value in variables.items():
        if name.startswith(_PREFIX) and environ.get(name, value) != value:
            logger.warning("%s=%s is overwritten with %s", name, environ[name], value)
    return variables


def measure_machine() -> Machine:
    """Return this machine's sizes; a disk or memory that cannot be read counts as 0."""
    try:
        disk = shutil.disk_usage("/tmp").total
    except OSError:
        disk = 0
    return Machine(free_host_memory() or 0, disk)


def _of_file(settings: Settings, model: ModelArtifacts) -> dict[str, str]:
    asked = settings.feature(LmcacheSettings)
    if asked.lmcache_config_file is None:
        return {}
    setting = asked.details.lmcache_config_file
    path = (model.directory or Path.cwd()) / asked.lmcache_config_file
    if not path.is_file():
        raise ConfigurationError(
            [
                f"{setting.stated}: there is no file {path}; the path is absolute, or "
                "relative to the model directory"
            ]
        )
    return {"LMCACHE_CONFIG_FILE": str(path)}


def _automatic(model_bytes: int, ranks: int, machine: Machine) -> dict[str, str]:
    return {
        "LMCACHE_MAX_LOCAL_CPU_SIZE": _share(machine.memory, model_bytes, ranks),
        "LMCACHE_MAX_LOCAL_DISK_SIZE": _share(machine.disk, model_bytes, ranks),
        "LMCACHE_LOCAL_DISK": f"file://{_cache_folder()}/",
        "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "true",
        "PYTHONHASHSEED": "0",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
    }


def _cache_folder() -> Path:
    """Return LMI's folder, or a per-user sibling where another user may have created it."""
    return trusted_folder(
        CACHE_FOLDER, per_user_sibling(CACHE_FOLDER), "LMCache", "option.lmcache_config_file"
    )


def _share(available: int, model_bytes: int, ranks: int) -> str:
    """Return whole GiB per rank, after the larger of two models and a fifth is reserved."""
    reserved = max(_RESERVED_MODELS * model_bytes, _RESERVED_SHARE * available)
    return str(math.floor(max(0.0, available - reserved) / ranks / _GIB))


def _model_bytes(directory: Path) -> int:
    """Return the bytes of the safetensors files, else of the bin files; 0 without either."""
    for pattern in ("*.safetensors", "*.bin"):
        if sizes := [path.stat().st_size for path in directory.rglob(pattern)]:
            return sum(sizes)
    return 0
