"""Active adapters as a metric, for endpoint pickers that route a request to its adapter.

vLLM's own series has the names of loads (`fr@1003`), one series more for each combination that ever
ran, and in several processes sums of times. The protocol of the Gateway API Inference Extension
wants one that was set last: it is made from the engine's slots when the metrics are asked for.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import ActiveAdapters
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.context import ServerEvents
from lmi_vllm.telemetry.metrics import Collectable

NAME: Final = "vllm:lora_requests_info"
_LABELS: Final = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


class RouterSeries:
    """All series of `found`, with vLLM's series of this name replaced by ours."""

    def __init__(
        self, found: Collectable, names: Sequence[str], active: ActiveAdapters, now: float
    ) -> None:
        self._found = found
        self._is_wanted = bool(active.slots) and (not names or NAME in names)
        self._active = active
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        yield from (metric for metric in self._found.collect() if metric.name != NAME)
        if not self._is_wanted:
            return
        active = self._active
        family = GaugeMetricFamily(NAME, "Adapters of requests.", labels=_LABELS)
        names = (",".join(active.waiting), ",".join(active.running))
        family.add_metric((str(active.slots), *names), self._now)
        yield family


@contextlib.asynccontextmanager
async def showing_adapters(
    service: InferenceService,
    _settings: Settings,
    _environ: Mapping[str, str],
    _events: ServerEvents,
) -> AsyncIterator[None]:
    """Show which adapters requests run on or wait for, while the body runs."""
    found = service.telemetry.series

    def series(names: Sequence[str]) -> Collectable:
        engine = service.loaded_engine
        active = ActiveAdapters() if engine is None else engine.active_adapters
        return RouterSeries(found(names), names, active, time.time())

    service.telemetry.series = series
    yield
