"""Architectures that vLLM dropped, served by a class that it has or by one of ours."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

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

# Registered with vLLM: name in `architectures` -> class.
MODEL_CLASSES: Final = MappingProxyType(
    {f"Lmi{name}": f"lmi_vllm.features.legacy_models.classes:{name}" for name in _CLASSES}
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.legacy_models.architectures import map_architecture
    from lmi_vllm.translate.draft import RulePhase

    c.rules[RulePhase.CHECKPOINT].append(map_architecture)
    c.model_classes |= MODEL_CLASSES
