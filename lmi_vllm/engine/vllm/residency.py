"""Which adapters the workers hold, in a slot or in main memory, by their own lists.

vLLM says nothing when it loads or evicts one: a step does, for an adapter that has no slot. So the
workers are asked again after each load, and while and after such a request. Each data-parallel rank
has lists of its own. This module imports no vLLM.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Final

from lmi_vllm.engine.base import ResidentAdapter
from lmi_vllm.engine.vllm.engine_calls import EngineCalls

logger = logging.getLogger(__name__)

# Whether it has a slot, and whether it is pinned.
Places = Mapping[int, tuple[bool, bool]]
_NOTHING: Final[Places] = {}


class Residency:
    """What the workers held when they were last asked."""

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls
        self._ranks: tuple[Places, ...] = (_NOTHING,)
        self._steps = 0
        self._changes_read = -1
        self._failure_level = logging.WARNING  # once

    @property
    def _changes(self) -> int:
        """A number that grows with each load, pin and removal, and with what was noted."""
        return self._steps + self._calls.answered

    def note_steps(self) -> None:
        """Have the workers asked again: an adapter that may have had no slot was in steps."""
        self._steps += 1

    def is_everywhere(self, adapter: int) -> bool:
        """Whether each rank had the adapter in a slot: its requests evict no other then."""
        return all(adapter in rank and rank[adapter][0] for rank in self._ranks)

    def named(self, names: Mapping[int, str]) -> tuple[tuple[ResidentAdapter, ...], ...]:
        """Return the adapters of each rank by name, which has one row for several loads."""
        return tuple(_named(rank, names) for rank in self._ranks)

    async def update(self, running: Collection[int]) -> None:
        """Ask the workers, if the lists may have changed; `running` has the adapters of requests.

        The call is not counted as one of the engine's: it shows no progress of requests.
        """
        changes = self._changes
        if changes == self._changes_read and all(map(self.is_everywhere, running)):
            return
        try:
            answers = await self._calls.resident_adapters()
        except Exception:  # vLLM raises a bare Exception here
            if self._calls.is_dead:
                return
            level, self._failure_level = self._failure_level, logging.DEBUG
            logger.log(level, "the workers do not say which adapters they hold", exc_info=True)
        else:
            self._ranks = tuple(map(_of_all_workers, answers))
        self._changes_read = changes


def _of_all_workers(answers: Collection[Collection[tuple[int, bool, bool]]]) -> Places:
    """Return what every worker of a rank holds: each has the layers of its own."""
    workers = [{one: (has_slot, pinned) for one, has_slot, pinned in rows} for rows in answers]
    common = set.intersection(*map(set, workers)) if workers else set()
    return {
        one: (all(rows[one][0] for rows in workers), all(rows[one][1] for rows in workers))
        for one in common
    }


def _named(rank: Places, names: Mapping[int, str]) -> tuple[ResidentAdapter, ...]:
    found: dict[str, ResidentAdapter] = {}
    for engine_id, (has_slot, is_pinned) in rank.items():
        if (name := names.get(engine_id)) is None:  # removed, or of the server itself
            continue
        other = found.get(name, ResidentAdapter(name))
        found[name] = ResidentAdapter(
            name, other.has_slot or has_slot, other.is_pinned or is_pinned
        )
    return tuple(found[name] for name in sorted(found))
