"""Exports as the settings ask for it, from an open port to the end of the server."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from lmi_vllm.config.settings import Settings
from lmi_vllm.features.exporters.emf import EmfSettings, EmfWriter, MetricLines
from lmi_vllm.features.exporters.lmi_series import LmiSeries, LmiSeriesSettings
from lmi_vllm.features.exporters.sagemaker_lines import (
    SageMakerSettings,
    TelemetryFile,
    failure_line,
)
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.context import ServerEvents
from lmi_vllm.telemetry.observers import Telemetry
from lmi_vllm.telemetry.records import Observer, RequestSummary


@contextlib.asynccontextmanager
async def exporting(
    service: InferenceService, settings: Settings, _: Mapping[str, str], events: ServerEvents
) -> AsyncIterator[None]:
    """Export while the body runs; CloudWatch's last line is written at its end."""
    if path := settings.feature(SageMakerSettings).sm_telemetry_log_rev_2022_12:
        _write_telemetry(service.telemetry, Path(path))
    if settings.feature(LmiSeriesSettings).prometheus:
        lmi = LmiSeries(lambda: service.lifecycle.model_name)
        service.telemetry.observers.append(lmi)
        events.on_ready.append(lambda ready: lmi.set_start(ready.phase_seconds))
    emf_settings = settings.feature(EmfSettings)
    if not emf_settings.lmi_metrics_emf:
        yield
        return
    lines = MetricLines(sys.stdout.fileno(), "LMI_METRICS_EMF")
    emf = EmfWriter(
        lines.write,
        emf_settings.lmi_metrics_emf_namespace,
        lambda: service.lifecycle.model_name,
        lambda: _gauges(service),
    )
    service.telemetry.observers.append(emf)
    events.on_ready.append(lambda ready: emf.write_start(ready.phase_seconds))
    flushing = asyncio.create_task(_flush_periodically(emf, emf_settings.lmi_metrics_emf_interval))
    try:
        yield
    finally:
        flushing.cancel()
        emf.flush()
        await asyncio.to_thread(lines.flush)


def _write_telemetry(hub: Telemetry, path: Path) -> None:
    """Append lines to SageMaker's file; further processes send theirs to the first one."""
    if hub.send_line is not None:
        hub.observers.append(_failure_sender(hub.send_line))
        return
    file = TelemetryFile(path)
    logging.getLogger().addHandler(file)
    hub.observers.append(file.observe)
    hub.on_line.append(file.report)


def _failure_sender(send: Callable[[str], None]) -> Observer:
    def observe(summary: RequestSummary) -> None:
        if (text := failure_line(summary)) is not None:
            send(text)

    return observe


def _gauges(service: InferenceService) -> dict[str, float]:
    adapters = service.registered_adapters
    return {
        "RequestsInFlight": service.queue.in_flight,
        "AdaptersRegistered": len(adapters),
        "AdaptersLoaded": sum(adapter.ref is not None for adapter in adapters),
    }


async def _flush_periodically(emf: EmfWriter, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        emf.flush()
