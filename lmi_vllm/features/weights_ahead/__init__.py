"""Weights are read into memory while vLLM is imported, so that its engine finds them there."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.weights_ahead.settings import WeightsAheadSettings

    c.settings.append(WeightsAheadSettings)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.weights_ahead.start import begin

    s.start.on_files.append(begin)
