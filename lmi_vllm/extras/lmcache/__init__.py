"""LMCache: its options, and the variables that its library reads."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    start_variables=(Lazy("lmi_vllm.extras.lmcache.variables:lmcache_variables"),),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.lmcache.rules import (
        LmcacheSettings,
        check_package,
        check_workers,
        kv_transfer,
    )
    from lmi_vllm.translate.draft import RulePhase

    c.settings(LmcacheSettings)
    c.rule(RulePhase.WRITTEN, kv_transfer)
    c.rule(RulePhase.PLACED, check_workers, check_package)
