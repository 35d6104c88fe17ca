"""A load run: when each request is sent, and the outcomes so far."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lmi_vllm.features.bench.plan import LoadPlan, LoadRequest, RequestOutcome, Requests


class Client(Protocol):
    """Sends requests; concurrent calls are allowed."""

    async def send(
        self, request: LoadRequest, outcome: RequestOutcome, now: Callable[[], float]
    ) -> None:
        """Send the request and fill `outcome`; a failure is recorded there and not raised."""
        ...


@dataclass(slots=True)
class LoadRun:
    """One run; `outcomes` are of ended requests, `cut` counts those cancelled by an interrupt."""

    plan: LoadPlan
    client: Client
    outcomes: list[RequestOutcome] = field(default_factory=list)
    in_flight: int = 0
    cut: int = 0
    seconds: float = 0.0  # from the first request to the last answer
    _started: float = field(default_factory=time.perf_counter)
    _sent: int = 0

    def now(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self._started

    async def run(self, stop: asyncio.Event) -> None:
        """Send the load until the plan is completed, or `stop` is set."""
        self._started = time.perf_counter()
        sending = asyncio.create_task(self._send_all(self.plan.requests()))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not sending.done():
            self.cut = self.in_flight
            sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        self.seconds = self.now()

    async def probe(self) -> RequestOutcome:
        """Send one request that is not counted, and return its outcome."""
        outcome = RequestOutcome(0.0)
        await self.client.send(self.plan.requests().next(), outcome, self.now)
        return outcome

    async def _send_all(self, requests: Requests) -> None:
        async with asyncio.TaskGroup() as group:
            if self.plan.rate:
                await self._send_at_rate(requests, group)
                return
            for _ in range(self.plan.concurrency):
                group.create_task(self._send_in_turn(requests))

    async def _send_in_turn(self, requests: Requests) -> None:
        while self._may_send():
            await self._send(requests.next(), self.now())

    async def _send_at_rate(self, requests: Requests, group: asyncio.TaskGroup) -> None:
        """Send requests at the plan's rate.

        A late one is timed from its planned arrival, so that waiting counts as latency.
        """
        slots = asyncio.Semaphore(self.plan.concurrency or 1 << 30)
        arrival = self.now()
        while self._may_send(arrival):
            await asyncio.sleep(max(0.0, arrival - self.now()))
            await slots.acquire()
            task = group.create_task(self._send(requests.next(), arrival))
            task.add_done_callback(lambda _: slots.release())
            arrival += requests.next_interval()

    def _may_send(self, at: float | None = None) -> bool:
        plan, at = self.plan, self.now() if at is None else at
        if plan.number is not None and self._sent >= plan.number:
            return False
        if plan.seconds is not None and at >= plan.seconds:
            return False
        self._sent += 1
        return True

    async def _send(self, request: LoadRequest, began: float) -> None:
        outcome = RequestOutcome(began, adapter=request.adapter)
        self.in_flight += 1
        try:
            await self.client.send(request, outcome, self.now)
            outcome.ended = self.now()
            self.outcomes.append(outcome)
        finally:
            self.in_flight -= 1
