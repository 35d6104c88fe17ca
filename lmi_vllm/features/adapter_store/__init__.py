"""Adapters on demand: what a request names and no call has registered comes from a store."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.adapter_store.settings import AdapterStoreSettings, check_store
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(AdapterStoreSettings)
    c.rules[RulePhase.PLACED].append(check_store)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.adapter_store.start import finding_adapters

    s.model_parts.append(finding_adapters)
