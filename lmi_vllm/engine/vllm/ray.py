"""Ray as what starts the workers: why it cannot, said before the engine is started.

vLLM says it only inside the engine's process, after the model was fetched, and not what to do.
"""

from collections.abc import Mapping
from typing import Final

from vllm.platforms import current_platform
from vllm.v1.executor import ray_utils

_BACKENDS: Final = ("distributed_executor_backend", "data_parallel_backend")
_OTHERWISE: Final = "Without Ray: mp on one machine, DJL_CLUSTER_SIZE for several"


def ray_problems(values: Mapping[str, object], origins: Mapping[str, object]) -> list[str]:
    """Why the arguments that ask for Ray cannot have it; empty where they can, or none asks."""
    asked = [f"{name}=ray ({origins.get(name, 'default')})" for name in _BACKENDS
             if values.get(name) == "ray"]  # fmt: skip
    reason = _reason() if asked else ""
    return [f"{word} is not possible: {reason}. {_OTHERWISE}" for word in asked if reason]


def _reason() -> str:
    if not current_platform.ray_device_key:
        return f"vLLM's platform here is {current_platform.device_name}, which does not support Ray"
    if not ray_utils.ray_is_available():
        return f"Ray cannot be imported ({ray_utils.ray_import_err}): pip install ray on every node"
    return ""
