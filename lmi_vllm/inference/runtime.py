"""What exists only once a model is loaded."""

from dataclasses import dataclass, field

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.engine.base import Engine
from lmi_vllm.inference.hooks.custom_code import CustomCode
from lmi_vllm.messages import ServingProfile


@dataclass(frozen=True, slots=True)
class Runtime:
    """The loaded model: its engine, how it is served, its adapters and its custom code."""

    engine: Engine
    profile: ServingProfile
    adapters: AdapterRegistry
    code: CustomCode = field(default_factory=CustomCode)
