"""Work on the event loop in turns: what many prompts of one request need does not come at once.

A list of 900 prompts makes 900 tasks, which all run in the same turn of the event loop.
"""

import asyncio


class TurnBudget:
    """The work that each turn of the event loop may do; the rest waits, or goes elsewhere."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._spent = 0

    def takes(self, cost: int) -> bool:
        """Whether this turn has room for the work, which is then counted; one always fits."""
        if self._spent and self._spent + cost > self._most:
            return False
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._begin)
        self._spent += cost
        return True

    async def wait(self, cost: int) -> None:
        """Return in a turn that has room for the work; at once in most."""
        while not self.takes(cost):  # noqa: ASYNC110 (each looks once a turn, in their order)
            await asyncio.sleep(0)

    def _begin(self) -> None:
        self._spent = 0
