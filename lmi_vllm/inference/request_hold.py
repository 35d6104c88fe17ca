"""What a request holds until its last byte: a place in the queue, its adapters, engine work."""

import contextlib

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry


class RequestHold(contextlib.AsyncExitStack):
    """An exit stack that takes each adapter once.

    All parts of a request thus see the same load of an adapter and the same hooks, although its
    name may stand for something else by the time the last of them asks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._adapters: dict[str, Adapter] = {}

    async def adapter(
        self, adapters: AdapterRegistry, name: str | None, alias: str | None = None
    ) -> Adapter | None:
        """Return the adapter, held; None is the base model.

        Raises:
            UnknownAdapterError: no adapter of that name; never the base model instead.
            RequestError: it is registered, but cannot be loaded now.
        """
        if not name:
            return None
        if name not in self._adapters:
            self._adapters[name] = await self.enter_async_context(adapters.hold(name, alias))
        return self._adapters[name]
