"""Spans of requests, sent by OpenTelemetry's protocol to where its own variables say."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_vllm.server.parts import ServerParts
    from lmi_vllm.translate.configuration import ConfigurationBuilder


def configure(c: "ConfigurationBuilder") -> None:
    """Add to the configuration."""
    from lmi_vllm.features.traces.endpoint import TraceSettings, put_endpoint
    from lmi_vllm.translate.draft import RulePhase

    c.settings.append(TraceSettings)
    c.rules[RulePhase.PLACED].append(put_endpoint)


def serve(s: "ServerParts") -> None:
    """Add to the server."""
    from lmi_vllm.features.traces.endpoint import plan_variables
    from lmi_vllm.features.traces.start import tracing

    s.start.plan_variables.append(plan_variables)
    s.model_parts.append(tracing)
