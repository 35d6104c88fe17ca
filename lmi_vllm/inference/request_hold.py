"""What a request holds until its last byte: a place in the queue, its adapters, engine work."""

import contextlib

from lmi_vllm.adapters.registry import AdapterRegistry, Lease


class RequestHold(contextlib.AsyncExitStack):
    """An exit stack that takes each adapter once.

    All parts of a request thus see the same load of an adapter and the same hooks, although its
    name may stand for something else by the time the last of them asks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leases: dict[str | None, Lease] = {}

    async def lease(
        self, adapters: AdapterRegistry, name: str | None, alias: str | None = None
    ) -> Lease:
        """Return the adapter, held; None is the base model.

        Raises:
            UnknownAdapterError: no adapter of that name; never the base model instead.
            RequestError: it is registered, but cannot be loaded now.
        """
        if name not in self._leases:
            self._leases[name] = await self.enter_async_context(adapters.lease(name, alias))
        return self._leases[name]
