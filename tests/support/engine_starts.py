"""How many real engines a run has started, how long that took, and how many it may start."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

# Starts that came to a ready engine, in a run of everything. A start is 10 to 20 s of a core: a new
# scenario shares a server that is there already, or raises the number here and says why it cannot.
# Each of three workers starts what its files share (the contract's engine, servers of scenarios):
# a run may have some more or less than the 24 and 121 that were counted. The contract has five more
# for DistilBERT and gte v1.5: each is a model of its own.
# Published weights and tokenizers are three more, of which no other server of the suite has any.
# Deployments of other servers are six more: what is proven is a start with their words.
# Sleep has three more: a model with code, an encoder with a decoder, and a start after another.
# A model in Google's store with adapters in Azure's is one more: its fetch is what is proven.
# One server with one slot for adapters, and two behind routers, are three more: what others share
# has two slots, publishes no events and would be asked by no one else meanwhile.
# Further front ends that end by themselves, with their template, or in a sleep, and engines of a
# fork server, are nine more: each of these tests ends processes that others of its server need.
# With them 155 were counted; which worker gets a file is chance, so a run may have a few more.
BUDGETS: Final[Mapping[str, int]] = MappingProxyType({"contract": 32, "integration": 162})


@dataclass
class EngineStarts:
    """The seconds of every start, by the suite that asked for it."""

    budgets: Mapping[str, int] = field(default_factory=lambda: BUDGETS)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, suite: str, seconds: float) -> None:
        """Remember one start."""
        self.seconds.setdefault(suite, []).append(seconds)

    @contextmanager
    def timed(self, suite: str) -> Iterator[None]:
        """Remember the body as a start, unless it fails."""
        began = time.monotonic()
        yield
        self.add(suite, time.monotonic() - began)

    @property
    def is_over_budget(self) -> bool:
        """Whether a suite has started more than it may."""
        return any(len(found) > self.budgets[suite] for suite, found in self.seconds.items())

    def lines(self) -> list[str]:
        """Return one line for each suite that has started an engine."""
        return [
            f"{suite}: started {len(found)} engines, {sum(found):.0f} s "
            f"(budget {self.budgets[suite]}, tests/support/engine_starts.py)"
            + (": TOO MANY, so this run fails" if len(found) > self.budgets[suite] else "")
            for suite, found in self.seconds.items()
        ]


# Of this process: servers are started by plain functions, which no pytest session is handed to.
STARTS: Final = EngineStarts()
