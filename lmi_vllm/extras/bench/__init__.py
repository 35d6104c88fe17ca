"""`bench`: load on any end point that speaks one of the dialects, and what came of it."""

from types import MappingProxyType
from typing import Final

from lmi_vllm.extension import Extra, Verb

EXTRA: Final = Extra(
    verbs=MappingProxyType(
        {
            "bench": Verb(
                "put an end point under load and say how it did", "lmi_vllm.extras.bench.command"
            )
        }
    )
)
