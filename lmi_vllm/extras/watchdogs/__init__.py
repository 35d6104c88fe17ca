"""Watchdogs of a running engine: one that stalls, or whose numbers are not finite, is replaced."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.watchdogs.settings:WatchdogSettings"),),
    late_rules=(Lazy("lmi_vllm.extras.watchdogs.settings:check_restart"),),
    lifespan=Lazy("lmi_vllm.extras.watchdogs.watchdogs:watching"),
)
