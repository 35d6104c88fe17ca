"""The Prometheus series of the server, summed over all front-end processes.

The processes write their values to files: prometheus_client's multiprocess mode, which
PROMETHEUS_MULTIPROC_DIR turns on at its import (settings.py sets it). Counters of a process that
has ended stay in the sums, so that no counter decreases.
"""

import shutil
from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import multiprocess, values
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from lmi_vllm.telemetry.metrics import Collectable, own_series

# The other front-end processes that run, by process id; the first one keeps it up to date.
OTHER_PROCESSES: Final[set[int]] = set()
# Their CPU seconds as they were last read, by process id; those of ended ones are at 0.
_CPU_SECONDS: Final[dict[int, float]] = {}
_ENDED: Final = 0
_CPU: Final = "process_cpu_seconds"
_FIRST_ONLY: Final = frozenset({"process_start_time_seconds", "process_max_fds"})


def is_shared() -> bool:
    """Whether this process writes its metrics to the shared files (PROMETHEUS_MULTIPROC_DIR)."""
    return bool(values.ValueClass._multiprocess)


def series_of_all(names: Sequence[str] = ()) -> Collectable:
    """Return a collector of the series of these names, or of all, over every process."""
    return _AllProcesses(frozenset(names)) if is_shared() else own_series(names)


def forget_process(pid: int) -> None:
    """Drop the gauges of a process that has ended; its counters stay in the sums."""
    OTHER_PROCESSES.discard(pid)
    _CPU_SECONDS[_ENDED] = _CPU_SECONDS.get(_ENDED, 0.0) + _CPU_SECONDS.pop(pid, 0.0)
    if is_shared():
        multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


def remove_files() -> None:
    """Remove the shared metric files; call it after all processes have ended."""
    if is_shared():
        shutil.rmtree(multiprocess.MultiProcessCollector(None)._path, ignore_errors=True)  # type: ignore[no-untyped-call]


class _AllProcesses:
    """Collects the series of all processes, and sums of their CPU and memory figures."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics with the wanted names; all without names."""
        collector = multiprocess.MultiProcessCollector(None)  # type: ignore[no-untyped-call]
        for metric in [*collector.collect(), *_kernel_series()]:  # type: ignore[no-untyped-call]
            if self._names:
                metric.samples = [one for one in metric.samples if one.name in self._names]
            if metric.samples:
                yield metric


def _kernel_series() -> list[Metric]:
    own = {metric.name: metric for metric in ProcessCollector(registry=None).collect()}
    for pid in tuple(OTHER_PROCESSES):
        for metric in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
            ours = own.get(metric.name)
            if ours is None or metric.name in _FIRST_ONLY:
                continue
            value = metric.samples[0].value
            if metric.name == _CPU:
                _CPU_SECONDS[pid] = value
            else:
                _add(ours, value)
    if _CPU in own:
        _add(own[_CPU], sum(_CPU_SECONDS.values()))
    return list(own.values())


def _add(metric: Metric, value: float) -> None:
    [sample] = metric.samples
    metric.samples = [sample._replace(value=sample.value + value)]
