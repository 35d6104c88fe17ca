"""LMCache: the variables that its library reads, from a file or sized after model and machine."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    late_rules=(Lazy("lmi_vllm.extras.lmcache.variables:check_package"),),
    start_variables=(Lazy("lmi_vllm.extras.lmcache.variables:lmcache_variables"),),
)
