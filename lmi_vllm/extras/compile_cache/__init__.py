"""Where compiled code is kept: folders of this user alone, and a cache between containers."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.compile_cache.store:CompileCacheSettings"),),
    around_start=Lazy("lmi_vllm.extras.compile_cache.start:kept_code"),
)
