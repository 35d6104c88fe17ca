"""TLS on addresses that begin with https: a PEM pair."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.tls.pair import TlsSettings, tls_of

    c.settings.append(TlsSettings)
    c.tls.fill(tls_of)
