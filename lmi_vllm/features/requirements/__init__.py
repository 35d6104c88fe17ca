"""A model's requirements.txt, installed before the engine starts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.config.settings import Settings
    from lmi_vllm.messages import ModelArtifacts
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add the check of a local model's file."""
    c.files.append(check_files)


def check_files(settings: "Settings", model: "ModelArtifacts") -> tuple[str, ...]:
    """Return the lines that would replace what the server stands on, if any."""
    from lmi_vllm.features.requirements.packages import faults

    return faults(model.directory) if settings.server.lmi_custom_code != "none" else ()


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.requirements.packages import Requirements

    s.start.packages.fill(Requirements)
