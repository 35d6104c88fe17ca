"""Spans of requests, sent by OpenTelemetry's protocol to where its own variables say."""

from typing import Final

from lmi_vllm.extension import Extra, Lazy

EXTRA: Final = Extra(
    settings=(Lazy("lmi_vllm.extras.traces.endpoint:TraceSettings"),),
    late_rules=(Lazy("lmi_vllm.extras.traces.endpoint:put_endpoint"),),
    plan_variables=(Lazy("lmi_vllm.extras.traces.endpoint:plan_variables"),),
    lifespan=Lazy("lmi_vllm.extras.traces.start:tracing"),
)
