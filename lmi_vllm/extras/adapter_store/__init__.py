"""Adapters on demand: what a request names and no call has registered comes from a store."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    lifespan=Lazy("lmi_vllm.extras.adapter_store.start:finding_adapters"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.adapter_store.settings import AdapterStoreSettings, check_store
    from lmi_vllm.translate.draft import RulePhase

    c.settings(AdapterStoreSettings)
    c.rule(RulePhase.PLACED, check_store)
