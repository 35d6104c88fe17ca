"""Failures within a time window turn `/ping` bad although the engine is alive (`error_rate_*`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.builder import ServerBuilder
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.error_rates.rates import ErrorRateSettings

    c.settings(ErrorRateSettings)


def serve(s: "ServerBuilder") -> None:
    """Add to the server."""
    from lmi_vllm.features.error_rates.rates import counting_errors

    s.lifespan(counting_errors)
