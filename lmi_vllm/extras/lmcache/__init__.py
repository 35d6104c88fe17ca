"""LMCache: the variables that its library reads, from a file or sized after model and machine."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(start_variables=(Lazy("lmi_vllm.extras.lmcache.variables:lmcache_variables"),))
