"""Who is sent when: bounds of a run, arrivals, shares, and an interruption."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from lmi_vllm.features.bench.plan import LengthRange, LoadPlan, LoadRequest, RequestOutcome
from lmi_vllm.features.bench.run import LoadRun


@dataclass
class Counting:
    """A client that waits for a gate and notes how many were in at once."""

    wanted: int
    full: asyncio.Event = field(default_factory=asyncio.Event)  # so many are in
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: int = 0
    most: int = 0
    seen: list[LoadRequest] = field(default_factory=list)

    async def send(
        self, request: LoadRequest, outcome: RequestOutcome, now: Callable[[], float]
    ) -> None:
        """Count, wait, answer."""
        self.seen.append(request)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        if self.at_once == self.wanted:
            self.full.set()
        try:
            await self.gate.wait()
            outcome.add_tokens(1, now())
        finally:
            self.at_once -= 1


async def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    """Never more than the concurrency, exactly the number in all."""
    client = Counting(3)
    run = LoadRun(LoadPlan(concurrency=3, number=20), client)
    running = asyncio.create_task(run.run(asyncio.Event()))
    await client.full.wait()
    client.gate.set()
    await running
    assert (len(run.outcomes), len(client.seen), client.most) == (20, 20, 3)
    assert run.cut == 0


async def test_arrivals_do_not_wait_for_answers() -> None:
    """With a rate all come although none has been answered; latencies count from the arrival."""
    client = Counting(30)
    run = LoadRun(LoadPlan(rate=1000.0, number=30, concurrency=0), client)
    running = asyncio.create_task(run.run(asyncio.Event()))
    await client.full.wait()
    client.gate.set()
    await running
    began = sorted(outcome.began for outcome in run.outcomes)
    assert len(set(began)) == 30
    gaps = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert len({round(gap, 6) for gap in gaps}) > 20, "arrivals are not evenly spread"


async def test_an_interruption_keeps_the_results() -> None:
    """What was in flight is told apart and counts as nothing."""
    client, stop = Counting(4), asyncio.Event()
    run = LoadRun(LoadPlan(concurrency=4, number=100), client)
    running = asyncio.create_task(run.run(stop))
    await client.full.wait()
    stop.set()
    await running
    assert (run.outcomes, run.cut, client.at_once) == ([], 4, 0)


def test_requests_from_the_same_seed_are_equal() -> None:
    """Lengths within their bounds, adapters by their weights, `base` as none."""
    plan = LoadPlan(
        prompt_words=LengthRange(3, 9),
        output_tokens=LengthRange(1, 4),
        adapters={"base": 1.0, "a": 3.0},
    )
    first, second = plan.requests(), plan.requests()
    drawn = [first.next() for _ in range(2000)]
    assert drawn == [second.next() for _ in range(2000)]
    assert {len(request.prompt.split()) for request in drawn} == set(range(3, 10))
    assert {request.output_tokens for request in drawn} == {1, 2, 3, 4}
    shares = Counter(request.adapter for request in drawn)
    assert set(shares) == {None, "a"}
    assert 0.2 < shares[None] / 2000 < 0.3
