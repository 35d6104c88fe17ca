"""Architectures that vLLM dropped, served by a class that it has or by one of ours."""

from types import MappingProxyType
from typing import Final

from lmi_vllm.extension import Extra, Lazy

_CLASSES: Final = (
    "BaichuanForCausalLM",
    "BaichuanAlibiForCausalLM",
    "Baichuan2ForCausalLM",
    "Baichuan2AlibiForCausalLM",
    "DbrxForCausalLM",
    "DeciLMForCausalLM",
    "DistilBertForSequenceClassification",
    "DistilBertModel",
    "GPTBigCodeForCausalLM",
    "MllamaTextForCausalLM",
    "MptForCausalLM",
    "QwenForCausalLM",
)

EXTRA: Final = Extra(
    checkpoint_rules=(Lazy("lmi_vllm.extras.legacy_models.architectures:map_architecture"),),
    model_classes=MappingProxyType(
        {f"Lmi{name}": f"lmi_vllm.extras.legacy_models.classes:{name}" for name in _CLASSES}
    ),
)
