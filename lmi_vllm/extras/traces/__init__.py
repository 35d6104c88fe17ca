"""Spans of requests, sent by OpenTelemetry's protocol to where its own variables say."""

from typing import TYPE_CHECKING, Final

from lmi_vllm.extension import Extra, Lazy

if TYPE_CHECKING:
    from lmi_vllm.translate.configuration import ConfigurationBuilder

EXTRA: Final = Extra(
    plan_variables=(Lazy("lmi_vllm.extras.traces.endpoint:plan_variables"),),
    lifespan=Lazy("lmi_vllm.extras.traces.start:tracing"),
)


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.extras.traces.endpoint import TraceSettings, put_endpoint
    from lmi_vllm.translate.draft import RulePhase

    c.settings(TraceSettings)
    c.rule(RulePhase.PLACED, put_endpoint)
