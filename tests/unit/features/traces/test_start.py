"""When spans begin: with a ready model, or as soon as a further process joins its engine."""

import pytest

from lmi_vllm.errors import StartupError
from lmi_vllm.features.traces import start
from lmi_vllm.features.traces.start import Traces
from lmi_vllm.messages import EngineArguments
from lmi_vllm.telemetry.observers import Telemetry

SENDING = EngineArguments({"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}, {})


async def test_the_first_process_waits_for_a_ready_model() -> None:
    """Its engine still has to fork when the start is planned."""
    hub = Telemetry()
    traces = Traces(hub, {})
    traces.prepare(SENDING)
    assert hub.start_span is None
    traces.begin()
    assert hub.start_span is not None
    await traces.close()


async def test_a_further_process_traces_from_its_joining_on() -> None:
    """The engine that it joins has been ready before."""
    hub = Telemetry(send_line=lambda _: None)
    traces = Traces(hub, {})
    traces.prepare(EngineArguments({}, {}))
    assert hub.start_span is None, "without an endpoint"
    traces.prepare(SENDING)
    assert hub.start_span is not None
    await traces.close()


def test_missing_libraries_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what installs them."""
    monkeypatch.setattr(start, "OTEL_MODULES", ("not_installed.at_all",))
    Traces(Telemetry(), {}).prepare(EngineArguments({}, {}))
    with pytest.raises(StartupError, match=r'pip install "lmi-vllm\[otel\]"'):
        Traces(Telemetry(), {}).prepare(SENDING)
