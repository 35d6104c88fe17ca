"""The checks of SageMaker's secure mode."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.secure_mode.controls import SageMakerSecurity, SecureModeSettings

    c.settings.append(SecureModeSettings)
    c.security.fill(SageMakerSecurity)
