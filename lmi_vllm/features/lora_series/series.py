"""Adapters as metrics, for endpoint pickers that route a request to where its adapter is.

vLLM's own `lora_requests_info` has the names of loads (`fr@1003`) and no adapter that is idle. It
has one series more for each combination that ever ran, and in several processes sums of times. The
protocol of the Gateway API Inference Extension wants one that was set last: it is made from the
engine's slots when the metrics are asked for.

Requests that wait for a slot do so before vLLM's scheduler. They count as waiting nevertheless: by
that number routers choose and autoscalers add servers.

Which adapters the workers hold has vLLM's coming names (its pull request 54830), which llm-d's
router reads. An adapter that was evicted has no series.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import ActiveAdapters, ResidentAdapter
from lmi_vllm.errors import LmiError
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.context import ServerEvents
from lmi_vllm.telemetry.metrics import Collectable

NAME: Final = "vllm:lora_requests_info"
LOADED: Final = "vllm:lora_adapter_loaded"
WITH_SLOT: Final = "vllm:num_gpu_loaded_lora_adapters"
IN_MEMORY: Final = "vllm:num_cpu_loaded_lora_adapters"
SLOTS: Final = "vllm:max_gpu_lora_adapters"
WAITING: Final = "vllm:num_requests_waiting"
NAMES: Final = frozenset({NAME, LOADED, WITH_SLOT, IN_MEMORY, SLOTS})
MOST_SHOWN: Final = 1000  # adapters of each rank, those with a slot first
READ_SECONDS: Final = 1.0  # between two questions to the workers
_LABELS: Final = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
_OF_RANK: Final = ("model_name", "engine")


class RouterSeries:
    """All series of `found`, with vLLM's series of these names replaced by ours."""

    def __init__(
        self,
        found: Collectable,
        names: Sequence[str],
        active: ActiveAdapters,
        now: float,
    ) -> None:
        self._found = found
        self._names = names
        self._active = active
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        for metric in self._found.collect():
            if metric.name == WAITING:
                yield _with_more(metric, self._active.queued)
            elif metric.name not in NAMES:
                yield metric
        if not self._active.slots:
            return
        for family in (self._requests(), *self._residency()):
            if not self._names or family.name in self._names:
                yield family

    def _requests(self) -> Metric:
        active = self._active
        idle = (one.name for rank in active.ranks for one in rank if one.has_slot)
        running = sorted({*active.running, *idle})
        family = GaugeMetricFamily(NAME, "Adapters that have or await a slot.", labels=_LABELS)
        names = (",".join(active.waiting), ",".join(running))
        family.add_metric((str(active.slots), *names), self._now)
        return family

    def _residency(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily(
            LOADED,
            "Adapters that the workers hold: gpu is in a slot, cpu in main memory only.",
            labels=(*_OF_RANK, "adapter_name", "level", "pinned"),
        )
        for engine, rank in enumerate(self._active.ranks):
            for one in sorted(rank, key=lambda one: not one.has_slot)[:MOST_SHOWN]:
                level = "gpu" if one.has_slot else "cpu"
                pinned = str(one.is_pinned).lower()
                labels = (self._active.model, str(engine), one.name, level, pinned)
                loaded.add_metric(labels, 1)
        yield loaded
        slots = self._active.slots
        yield self._counts(WITH_SLOT, "Adapters in a slot.", _with_slot)
        yield self._counts(IN_MEMORY, "Adapters in main memory, with a slot or not.", len)
        yield self._counts(SLOTS, "Adapters that can have a slot.", lambda _: slots)

    def _counts(
        self, name: str, text: str, count: Callable[[Sequence[ResidentAdapter]], int]
    ) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_OF_RANK)
        for engine, rank in enumerate(self._active.ranks):
            family.add_metric((self._active.model, str(engine)), count(rank))
        return family


def _with_more(metric: Metric, count: int) -> Metric:
    """Return a gauge with `count` more in its first series, which routers read of several."""
    found = Metric(metric.name, metric.documentation, metric.type)
    first, *others = metric.samples or (None,)
    found.samples = [] if first is None else [first._replace(value=first.value + count), *others]
    return found


def _with_slot(rank: Sequence[ResidentAdapter]) -> int:
    return sum(one.has_slot for one in rank)


async def _keep_reading(service: InferenceService) -> None:
    """Have the loaded engine ask its workers, as often as something may have changed."""
    changed = asyncio.Event()  # the server is ready, or its engine back
    service.lifecycle.on_state.append(lambda _: changed.set())
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_SECONDS):  # `wait_for` makes a task each time
                await changed.wait()
        changed.clear()
        if (engine := service.loaded_engine) is not None:
            with contextlib.suppress(LmiError):  # it is gone
                await engine.read_adapters()


@contextlib.asynccontextmanager
async def showing_adapters(
    service: InferenceService,
    _settings: Settings,
    _environ: Mapping[str, str],
    _events: ServerEvents,
) -> AsyncIterator[None]:
    """Show which adapters the engine holds and requests wait for, while the body runs."""
    found = service.telemetry.series

    def series(names: Sequence[str]) -> Collectable:
        engine = service.loaded_engine
        active = ActiveAdapters() if engine is None else engine.active_adapters
        return RouterSeries(found(names), names, active, time.time())

    service.telemetry.series = series
    reading = asyncio.create_task(_keep_reading(service))
    try:
        yield
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
