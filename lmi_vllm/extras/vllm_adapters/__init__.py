"""vLLM's own two routes that load and unload adapters."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    routes=(Lazy("lmi_vllm.extras.vllm_adapters.routes:GROUP"),),
)
