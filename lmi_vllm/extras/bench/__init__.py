"""`bench`: put load on any endpoint that speaks one of the dialects, and report latencies."""

from types import MappingProxyType
from typing import Final

from lmi_vllm.extension import Extra, Verb

EXTRA: Final = Extra(
    verbs=MappingProxyType(
        {
            "bench": Verb(
                "put load on an endpoint and report the figures", "lmi_vllm.extras.bench.command"
            )
        }
    )
)
