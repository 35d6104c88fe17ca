"""LMCache: its options, and the variables that its library reads."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.lmcache.addresses import check_event_endpoint, check_side_channel
    from lmi_vllm.features.lmcache.rules import (
        LmcacheSettings,
        check_package,
        check_workers,
        kv_transfer,
    )
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(LmcacheSettings)
    c.rules[RulePhase.WRITTEN].append(kv_transfer)
    c.rules[RulePhase.PLACED] += (
        check_workers, check_package, check_event_endpoint, check_side_channel
    )  # fmt: skip


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.lmcache.variables import lmcache_variables

    s.start.start_variables.append(lmcache_variables)
