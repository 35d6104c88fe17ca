"""Adapters on demand: what a request names and no call has registered comes from a store."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.adapter_store.settings:AdapterStoreSettings"),),
    late_rules=(Lazy("lmi_vllm.extras.adapter_store.settings:check_store"),),
    lifespan=Lazy("lmi_vllm.extras.adapter_store.start:finding_adapters"),
)
