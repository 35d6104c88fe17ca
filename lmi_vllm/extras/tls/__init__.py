"""TLS on addresses that begin with https: a PEM pair."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.tls.pair:TlsSettings"),),
    tls=Lazy("lmi_vllm.extras.tls.pair:tls_of"),
)
