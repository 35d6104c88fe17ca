"""The compile cache: what vLLM compiles, kept between containers."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.compile_cache.store:CompileCacheSettings"),),
    around_start=Lazy("lmi_vllm.extras.compile_cache.start:compile_cache"),
)
