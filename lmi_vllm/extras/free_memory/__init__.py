"""Memory that has to be free before a model is loaded: LMI's required_memory_mb and its like."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.free_memory.check:FreeMemorySettings"),),
    plan_checks=(Lazy("lmi_vllm.extras.free_memory.check:check_memory"),),
)
