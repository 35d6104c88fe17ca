"""LMCache: its options, and the variables that its library reads."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.lmcache.rules:LmcacheSettings"),),
    rules=(Lazy("lmi_vllm.extras.lmcache.rules:kv_transfer"),),
    late_rules=(
        Lazy("lmi_vllm.extras.lmcache.rules:check_workers"),
        Lazy("lmi_vllm.extras.lmcache.rules:check_package"),
    ),
    start_variables=(Lazy("lmi_vllm.extras.lmcache.variables:lmcache_variables"),),
)
