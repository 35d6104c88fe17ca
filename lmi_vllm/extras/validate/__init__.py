"""`validate`: checks the settings against the model's own config.json, and estimates memory."""

from types import MappingProxyType
from typing import Final

from lmi_vllm.extension import Extra, Verb

EXTRA: Final = Extra(
    verbs=MappingProxyType(
        {
            "validate": Verb(
                "explain, and check the settings against the model",
                "lmi_vllm.extras.validate.command",
            )
        }
    ),
)
