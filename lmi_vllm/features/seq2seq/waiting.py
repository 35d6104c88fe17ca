"""Sequences that wait for a row: a long list does not make other requests wait for its end."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from lmi_vllm.features.seq2seq.batch import StepRequest

SPARE_PART: Final = 8  # one row of so many is for requests that have none yet


class WaitingSequences:
    """Sequences that wait, by the request of the client's that they belong to.

    The request with the fewest rows is next; requests with equally many take turns.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._most_of_one = max(1, max_rows - max(1, max_rows // SPARE_PART))
        self._by_owner: dict[object, deque[tuple[StepRequest, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def add(self, request: StepRequest) -> None:
        """Add all sequences of a request."""
        of_owner = self._by_owner.setdefault(request.owner, deque())
        of_owner.extend((request, index) for index in range(request.sampling.n))

    def take(self, rows: Mapping[object, int]) -> tuple[StepRequest, int] | None:
        """Remove and return the next sequence; None while no row is free for one.

        `rows` are those that run, by owner. Who has some leaves the spare ones to others.
        """
        used = sum(rows.values())
        if used >= self._max_rows or not self._by_owner:
            return None
        owner = min(self._by_owner, key=lambda one: rows.get(one, 0))
        if used >= self._most_of_one and rows.get(owner, 0):
            return None
        of_owner = self._by_owner.pop(owner)
        taken = of_owner.popleft()
        if of_owner:
            self._by_owner[owner] = of_owner  # behind the others: they are asked in this order
        return taken

    def keep(self, stays: Callable[[StepRequest], bool]) -> None:
        """Remove the sequences of the other requests."""
        kept = {
            owner: deque(one for one in waiting if stays(one[0]))
            for owner, waiting in self._by_owner.items()
        }
        self._by_owner = {owner: waiting for owner, waiting in kept.items() if waiting}

    def clear(self) -> None:
        """Remove all sequences."""
        self._by_owner.clear()
