"""`custom_code`: the user's own functions around requests, in a model.py or in an adapter's."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.config.settings import Settings
    from lmi_vllm.messages import ModelArtifacts
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    c.code.fill(check_code)


def check_code(settings: "Settings", model: "ModelArtifacts") -> tuple[str, ...]:
    """Return warnings of the model's code, without running it.

    Raises:
        StartupError: it cannot be loaded.
    """
    from lmi_vllm.features.custom_code.start import CustomCodeLoader
    from lmi_vllm.server.code_start import code_loader

    return code_loader(settings, CustomCodeLoader).check(settings, model)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.custom_code.start import CustomCodeLoader

    s.start.code.fill(CustomCodeLoader)
