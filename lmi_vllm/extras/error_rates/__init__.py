"""Failures within a time window turn `/ping` bad although the engine is alive (`error_rate_*`)."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.error_rates.rates:ErrorRateSettings"),),
    lifespan=Lazy("lmi_vllm.extras.error_rates.rates:counting_errors"),
)
