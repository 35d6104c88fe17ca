"""Failures within a time window turn `/ping` bad although the engine is alive (`error_rate_*`)."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    lifespan=Lazy("lmi_vllm.extras.error_rates.rates:counting_errors"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.error_rates.rates import ErrorRateSettings

    c.settings(ErrorRateSettings)
