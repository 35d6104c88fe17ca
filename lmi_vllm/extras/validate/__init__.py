"""`validate`: checks the settings against the model's own config.json, and estimates memory."""

from types import MappingProxyType
from typing import Final

from lmi_vllm.extension import Extra, Lazy, Verb

EXTRA: Final = Extra(
    verbs=MappingProxyType(
        {
            "validate": Verb(
                "explain, and check the settings against the model",
                "lmi_vllm.extras.validate.command",
            )
        }
    ),
    placement_rules=(Lazy("lmi_vllm.extras.validate.model_shape:offer_sizes"),),
    checkpoint_rules=(Lazy("lmi_vllm.extras.validate.model_shape:refuse_size"),),
)
