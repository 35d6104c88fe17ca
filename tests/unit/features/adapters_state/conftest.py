"""Registries over one object in a real S3 store, each as the server of a replica has it."""

import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.features.adapters_state import sharing
from lmi_vllm.features.adapters_state.shared_object import StateObject
from lmi_vllm.features.adapters_state.sharing import ReplicaAdapters
from lmi_vllm.features.scripted.engine import ScriptedEngine
from tests.support.adapter_hooks import hook
from tests.support.assembled import store_of
from tests.support.s3_server import BUCKET, Refusal, S3Server

FOLDER = f"s3://{BUCKET}/state/"
KEY = "state/adapters.json"
AWAY = Refusal(503, "SlowDown")


class Replica:
    """One server's registry, and what shares it; `sync` is what its loop does."""

    def __init__(self, s3: S3Server, name: str) -> None:
        self.engine = ScriptedEngine()
        self.refused: set[str] = set()
        self.broken: set[str] = set()  # sources that fail with an error of another's
        self.gate: threading.Event | None = None  # what sources wait for
        self.load_seconds = 0.0  # by the clock, for each source
        self.asked: list[str] = []  # sources, in the order in which they were looked up
        self.registry = AdapterRegistry(self.engine, self._resolve, is_enabled=True)
        store = store_of(FOLDER)
        assert store is not None
        self.state = StateObject(store.make_store(FOLDER, s3.environ), "adapters.json", name)
        self.time = 0.0
        self.shared = ReplicaAdapters(
            self.registry, self.state, 5.0, lambda: 5.0, lambda: self.time
        )

    async def begin(self) -> "Replica":
        """Have what is shared."""
        hook(self.registry, sharing=self.shared)
        await self.shared.begin()
        return self

    async def sync(self) -> None:
        """Read and write once."""
        await self.shared.sync(reconcile_seconds=60.0)

    @property
    def names(self) -> list[str]:
        """Return what requests may name here."""
        return sorted(adapter.name for adapter in self.registry)

    def _resolve(self, src: str) -> str:
        self.asked.append(src)
        self.time += self.load_seconds
        if self.gate is not None and src != "/own":
            self.gate.wait(60)
        if src in self.broken:
            raise RuntimeError(src)
        if src in self.refused:
            raise AdapterRefusedError(f"{src} is not here")
        return src


Start = Callable[..., Any]


@pytest.fixture
async def start(empty_store: S3Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Return what makes a replica, not begun."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(sharing, "CONFIRM_PAUSE_SECONDS", 0.02)
    made: list[Replica] = []

    def make(name: str) -> Replica:
        made.append(Replica(empty_store, name))
        return made[-1]

    yield make
    for one in made:
        await one.shared.close()


def document(s3: S3Server) -> Any:
    """Return the object."""
    return json.loads(s3.client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read())
