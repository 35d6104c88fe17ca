"""The namespace of `vllm serve` for some arguments."""

from argparse import Namespace
from collections.abc import Mapping

from lmi_vllm.messages import EngineArguments


def namespace_of(values: Mapping[str, object]) -> Namespace:
    """Return it as the engine gets it."""
    from lmi_vllm.engine.vllm.configuration import VllmArguments  # noqa: PLC0415 (imports vLLM)

    return VllmArguments.of(EngineArguments(values)).namespace
