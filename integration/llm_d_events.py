"""A subscriber of the events of a server's KV cache, as a router of llm-d's kind is one."""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

READ_MS = 20_000


def published_at(port: int) -> dict[str, str]:
    """Return the variable with which a server publishes its events at this port."""
    # vLLM binds an address with `*`, and connects to any other.
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    return {"OPTION_KV_EVENTS_CONFIG": json.dumps(told)}


class Events:
    """The events that come after `start`, in their order."""

    def __init__(self, port: int) -> None:
        import zmq  # noqa: PLC0415 (comes with vLLM)

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.subscribe(b"")
        self._stored: list[dict[str, Any]] = []
        self._numbers = count()

    def fresh(self, prompt: str) -> str:
        """Return the prompt with another beginning than any before: no block has it."""
        return f"{next(self._numbers)} {prompt}"

    def start(self, ask: Callable[[], object]) -> None:
        """Ask until events come: what is published before the subscription is lost."""
        for _ in range(100):
            ask()
            if self._socket.poll(100):
                break
        while self._socket.poll(300):
            self._socket.recv_multipart()

    def stored(self) -> tuple[str | None, frozenset[Any]]:
        """Return the adapter's name and the blocks of the next request that stored some."""
        import msgspec  # noqa: PLC0415 (comes with vLLM)

        while not self._stored:
            assert self._socket.poll(READ_MS), "no event came"
            _, _, batch = self._socket.recv_multipart()
            _, events, *_ = msgspec.msgpack.decode(batch)
            self._stored += (event for event in events if event["type"] == "BlockStored")
        one = self._stored.pop(0)
        return one["lora_name"], frozenset(one["block_hashes"])

    def close(self) -> None:
        """Leave."""
        self._socket.close(linger=0)
