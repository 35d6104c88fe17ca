"""VLLM_CPU_KVCACHE_SPACE, vLLM's older word for the size of the KV cache on a CPU."""

from typing import Final

from lmi_vllm.messages import OriginKind
from lmi_vllm.translate.draft import ArgumentDraft

_SIZE: Final = "kv_cache_memory_bytes"
_GIB: Final = 1 << 30


def put_cpu_cache(draft: ArgumentDraft) -> None:
    """Set the size by the variable; it comes before a file, as every variable does.

    vLLM takes the variable whatever else is set, so another word beside it is refused.
    """
    server = draft.settings.server
    gib, space = server.vllm_cpu_kvcache_space, server.details.vllm_cpu_kvcache_space
    if gib is None or draft.devices.gpu_count:
        return
    origin = draft.origins.get(_SIZE)
    if origin is not None and origin.kind is not OriginKind.FILE:
        draft.fail(
            f"{space.stated} and {draft.label(_SIZE)}={draft.values[_SIZE]} both size the KV cache "
            f"on a CPU: set one of them",
            space,
        )
    draft.put(_SIZE, gib * _GIB, space.origin)
