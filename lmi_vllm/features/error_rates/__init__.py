"""Failures within a time window turn `/ping` bad although the engine is alive (`error_rate_*`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.error_rates.rates import ErrorRateSettings

    c.settings.append(ErrorRateSettings)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.error_rates.rates import counting_errors

    s.lifespans.append(counting_errors)
