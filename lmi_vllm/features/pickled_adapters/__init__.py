"""Adapters whose weights are a pickle (`adapter_model.bin`): they become safetensors."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from lmi_vllm.server.parts import ServerParts


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    s.engines.vllm.pickled_weights.fill(convert_pickle)


def convert_pickle(pickle: "Path", weights: "Path") -> str:
    """Turn the pickle into safetensors; return why that cannot be."""
    from lmi_vllm.features.pickled_adapters.convert import convert

    return convert(pickle, weights)
