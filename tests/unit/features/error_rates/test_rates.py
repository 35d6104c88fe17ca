"""Errors within a window turn health bad, and only those that count."""

import pytest

from lmi_vllm.clock import Clock as ServerClock
from lmi_vllm.errors import (
    EngineDeadError,
    Fault,
    LmiError,
    NotReadyError,
    OverloadError,
    PayloadError,
    ResourceNotFoundError,
)
from lmi_vllm.features.error_rates.rates import (
    ErrorKind,
    ErrorRate,
    ErrorRates,
    counting_errors,
    error_rate,
)
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.server.context import ServerEvents, new_service
from tests.support.assembled import load_settings


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
    return ErrorRates({kind: ErrorRate(count, seconds)}, lambda _: None, clock), clock


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
def test_failures_are_counted_by_kind(kind: ErrorKind, error: LmiError, counts: bool) -> None:
    """The queue's refusals and the rest are told apart; not ready and 404 count for nothing."""
    found, _ = rates(kind)
    found.note(error.fault)
    assert found.reached is None
    found.note(error.fault)
    assert found.reached == (kind if counts else None)


def test_errors_further_apart_than_the_window_do_not_add_up() -> None:
    """The window slides."""
    found, clock = rates(ErrorKind.SERVER, 3, 60)
    for seconds in (0, 59, 2, 59):  # three within 61 s, never within 60
        clock.now += seconds
        found.note(Fault.CLIENT)
    assert found.reached is None
    clock.now += 1
    found.note(Fault.CLIENT)
    assert found.reached is ErrorKind.SERVER


@pytest.mark.parametrize(("status", "counts"), [(200, 0), (400, 0), (404, 0), (424, 1), (503, 1)])
def test_answers_of_the_engine_count_by_status(status: int, counts: int) -> None:
    """424 and every 5xx."""
    found, _ = rates(ErrorKind.SERVER, 1)
    found.note(status)
    assert (found.reached is not None) == bool(counts)


def test_failed_ping_stays_failed() -> None:
    """Sticky: quiet times do not bring health back; the status text does not change."""
    lifecycle, clock = Lifecycle(), Clock()
    rates = ErrorRates({ErrorKind.ANY: ErrorRate(1, 60)}, lifecycle.mark_unhealthy, clock)
    lifecycle.on_failure.append(rates.note)
    lifecycle.set_state(State.HEALTHY)
    assert lifecycle.ping()[0] == 200
    lifecycle.note_failure(Fault.CLIENT)
    clock.now += 10_000
    reason = ErrorKind.ANY.value
    assert lifecycle.ping() == (503, {"model": {"status": "Healthy", "unhealthy": reason}})
    lifecycle.check_ready()


@pytest.mark.parametrize(
    ("environ", "is_first", "status"),
    [
        ({"SERVING_ERROR_RATE_SERVER": "1/PT1M"}, True, 503),
        ({"SERVING_ERROR_RATE_SERVER": "1/PT1M"}, False, 200),
        ({"SERVING_ERROR_RATE_SERVER": "2/PT1M"}, True, 200),
        ({"SERVING_ERROR_RATE_WLM": "1"}, True, 200),
        ({}, True, 200),
    ],
)
async def test_settings_choose_the_counted_errors(
    environ: dict[str, str], is_first: bool, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By the process that answers for health."""
    settings = load_settings(environ)
    assert settings.warnings == ()
    service = new_service(settings, ServerClock())
    events = ServerEvents(is_first=is_first)
    async with counting_errors(service, settings, environ, events):
        service.lifecycle.set_state(State.HEALTHY)
        service.lifecycle.note_failure(500)
        found, body = service.lifecycle.ping()
        assert found == status
        told = "there were too many errors (SERVING_ERROR_RATE_SERVER=1/PT1M)"
        assert body["model"].get("unhealthy") == (told if status == 503 else None)
        assert (told in caplog.text) == (status == 503)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", (5, 60)),
        ("5/PT1M", (5, 60)),
        ("3/pt30s", (3, 30)),
        ("3/PT0.5S", (3, 0.5)),
        ("1/P1D", (1, 86400)),
        ("2/P1DT2H3M4S", (2, 93784)),
        ("4/90", (4, 90)),
    ],
)
def test_error_rate(text: str, expected: tuple[int, float]) -> None:
    """A number of errors and a time; a minute where none is given."""
    assert error_rate(text) == expected


@pytest.mark.parametrize(
    "text", ["", "x", "0/PT1M", "5/", "5/PT", "5/P", "5/0", "5/1M", "-1", "5/PT1M1"]
)
def test_error_rate_refuses(text: str) -> None:
    """What is no number, no time, or nothing at all."""
    with pytest.raises(ValueError, match="such as 5/PT1M"):
        error_rate(text)
