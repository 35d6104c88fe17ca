"""`migrate`: the configuration of another server, written as ours."""

from types import MappingProxyType
from typing import Final

from lmi_vllm.extension import Extra, Verb

EXTRA: Final = Extra(
    verbs=MappingProxyType(
        {
            "migrate": Verb(
                "turn an LMI, TGI or vllm serve configuration into ours",
                "lmi_vllm.extras.migrate.command",
            )
        }
    )
)
