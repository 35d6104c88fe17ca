"""When spans begin: with a ready model, or as soon as a further process joins its engine."""

from dataclasses import replace
from typing import Any, cast

import pytest

from lmi_vllm.errors import StartupError
from lmi_vllm.features.traces import start
from lmi_vllm.features.traces.start import tracing
from lmi_vllm.messages import EngineArguments
from lmi_vllm.server.context import ModelContext
from tests.support.assembled import load_settings, model_context

NOWHERE = EngineArguments({}, {})
SENDING = EngineArguments({"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}, {})
READY = cast(Any, None)


def model(*, is_first: bool = True, arguments: EngineArguments = SENDING) -> ModelContext:
    """Return a model whose engine has these arguments."""
    return replace(model_context(load_settings({}), is_first=is_first), arguments=arguments)


async def test_the_first_process_waits_for_a_ready_model() -> None:
    """Its engine still has to fork when the start is planned."""
    first = model()
    hub = first.service.telemetry
    async with tracing(first):
        assert hub.start_span is None
        for notify in first.on_ready:
            notify(READY)
        assert hub.start_span is not None
    assert hub.start_span is None


async def test_a_further_process_traces_from_its_joining_on() -> None:
    """The engine that it joins has been ready before."""
    for arguments, is_traced in ((NOWHERE, False), (SENDING, True)):
        further = model(is_first=False, arguments=arguments)
        async with tracing(further):
            assert (further.service.telemetry.start_span is not None) == is_traced


async def test_missing_libraries_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what installs them."""
    monkeypatch.setattr(start, "OTEL_MODULES", ("not_installed.at_all",))
    await model(arguments=NOWHERE).enter([tracing])
    with pytest.raises(StartupError, match=r'pip install "lmi-vllm\[otel\]"'):
        await model().enter([tracing])
