"""Errors within a window turn health bad, and only those that count."""

import pytest

from lmi_vllm.errors import (
    EngineDeadError,
    LmiError,
    NotReadyError,
    OverloadError,
    PayloadError,
    ResourceNotFoundError,
)
from lmi_vllm.inference.error_rates import ErrorKind, ErrorRate, ErrorRates
from lmi_vllm.inference.lifecycle import Lifecycle, State


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def rates(kind: ErrorKind, count: int = 2, seconds: float = 60) -> tuple[ErrorRates, Clock]:
    """Return rates with one limit, and their clock."""
    clock = Clock()
    return ErrorRates({kind: ErrorRate(count, seconds)}, clock), clock


@pytest.mark.parametrize(
    ("kind", "error", "counts"),
    [
        (ErrorKind.SERVER, PayloadError("a"), True),
        (ErrorKind.SERVER, EngineDeadError(), True),
        (ErrorKind.SERVER, LmiError("a"), True),
        (ErrorKind.SERVER, OverloadError("m"), False),
        (ErrorKind.WORKLOAD, OverloadError("m"), True),
        (ErrorKind.WORKLOAD, PayloadError("a"), False),
        (ErrorKind.ANY, OverloadError("m"), True),
        (ErrorKind.ANY, PayloadError("a"), True),
        (ErrorKind.ANY, NotReadyError("a"), False),
        (ErrorKind.ANY, ResourceNotFoundError("a"), False),
    ],
)
def test_what_counts_towards_what(kind: ErrorKind, error: LmiError, counts: bool) -> None:
    """The queue's refusals and the rest are told apart; not ready and 404 count for nothing."""
    found, _ = rates(kind)
    found.record(error)
    assert found.reached is None
    found.record(error)
    assert found.reached == (kind if counts else None)


def test_errors_further_apart_than_the_window_do_not_add_up() -> None:
    """The window slides."""
    found, clock = rates(ErrorKind.SERVER, 3, 60)
    for seconds in (0, 59, 2, 59):  # three within 61 s, never within 60
        clock.now += seconds
        found.record(PayloadError("a"))
    assert found.reached is None
    clock.now += 1
    found.record(PayloadError("a"))
    assert found.reached is ErrorKind.SERVER


@pytest.mark.parametrize(("status", "counts"), [(200, 0), (400, 0), (404, 0), (424, 1), (503, 1)])
def test_answers_of_the_engine_count_by_status(status: int, counts: int) -> None:
    """424 and every 5xx."""
    found, _ = rates(ErrorKind.SERVER, 1)
    found.record_status(status)
    assert (found.reached is not None) == bool(counts)


def test_ping_stays_bad() -> None:
    """Sticky: quiet times do not bring health back; the status text does not change."""
    error_rates, clock = rates(ErrorKind.ANY, 1)
    lifecycle = Lifecycle(error_rates=error_rates)
    lifecycle.become(State.HEALTHY)
    assert lifecycle.ping()[0] == 200
    lifecycle.error_rates.record(PayloadError("a"))
    clock.now += 10_000
    assert lifecycle.ping() == (503, {"model": {"status": "Healthy"}})
    lifecycle.check_ready()
