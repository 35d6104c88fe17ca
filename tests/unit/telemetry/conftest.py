"""An ended request to tell observers of."""

from collections.abc import Callable

import pytest

from lmi_vllm.telemetry.records import RequestSummary

Ended = Callable[..., RequestSummary]


@pytest.fixture
def ended() -> Ended:
    """Return how a request is made that has ended as told."""

    def make(status: int = 200, seconds: float = 1.0, **fields: object) -> RequestSummary:
        path = "/invocations"
        base = ("id", "POST", path, path, "127.0.0.1", status, "lmi", "", seconds)
        return RequestSummary(*base, **{"is_inference": True, **fields})  # type: ignore[arg-type]

    return make
