import asyncio

import pytest

from lmi_vllm.errors import OverloadError
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.queue import RequestQueue
from tests.support.queue import admitted


def queue(limit: int = 2) -> RequestQueue:
    """Return the queue of the healthy model m."""
    lifecycle = Lifecycle("m")
    lifecycle.set_state(State.HEALTHY)
    return RequestQueue(lifecycle, limit)


async def test_queue_limit_refuses_one_more_only() -> None:
    """Above the limit a request is refused, and what is in flight is not touched."""
    made = queue()
    with admitted(made), admitted(made):
        with pytest.raises(OverloadError, match=r"^Worker queue capacity exceeded for model: m$"):
            admitted(made).__enter__()
        assert made.in_flight == 2
    with admitted(made):
        assert made.in_flight == 1
    assert made.in_flight == 0


async def test_queue_counts_each_element() -> None:
    """A list takes as many places as it has elements, all or none."""
    made = queue()
    with admitted(made):
        with pytest.raises(OverloadError):
            admitted(made, 2).__enter__()
        assert made.in_flight == 1
    with admitted(made, 2):
        assert made.in_flight == 2


async def test_queue_place_is_given_back_on_error() -> None:
    """A request that fails leaves its place."""
    made = queue()
    with pytest.raises(ValueError, match="x"), admitted(made):
        raise ValueError("x")
    assert made.in_flight == 0


async def test_queue_waits_for_the_last_request() -> None:
    """Draining waits until nothing is in flight, or says that its time is over."""
    made = queue()
    with admitted(made):
        assert not await made.wait_idle(0.01)
        waiting = asyncio.create_task(made.wait_idle(5))
    assert await waiting


async def test_queue_end_all_leaves_each_request_an_answer() -> None:
    """What a shutdown cuts off is told so; a cancellation from elsewhere is not taken back."""
    made = queue()
    begun = asyncio.Event()

    async def request() -> str:
        with admitted(made):
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return str(made.shutdown_error())
        return ""

    task = asyncio.create_task(request())
    await begun.wait()
    assert made.shutdown_error() is None
    made.cancel_all()
    assert "shut down" in await task


async def test_queue_takes_another_limit() -> None:
    """A registered model may bring its own; what is in flight stays."""
    made = queue()
    with admitted(made, 2):
        made.resize(1)
        with pytest.raises(OverloadError):
            made.check_room()
        made.resize(3)
        with admitted(made):
            assert made.in_flight == 3


async def test_task_is_ended_as_long_as_it_has_one_request() -> None:
    """A connection answers several, one after the other, and the first may go on beside it."""
    made = queue()

    async def connection() -> None:
        first = made.take()
        with admitted(made):
            first()
            await asyncio.sleep(60)

    task = asyncio.create_task(connection())
    await asyncio.sleep(0)
    made.cancel_all()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.in_flight == 0
