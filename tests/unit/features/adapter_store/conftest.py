"""Adapters in a real S3 store, found for a registry over the scripted engine."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.features.adapter_store.files import locked_files
from lmi_vllm.features.adapter_store.on_demand import OnDemandAdapters
from lmi_vllm.features.adapter_store.settings import CachePolicy
from lmi_vllm.features.adapter_store.stores import (
    AdapterStore,
    StoredAdapter,
    open_adapter_store,
)
from lmi_vllm.features.scripted.engine import ScriptedEngine
from tests.support.adapter_files import CAPITALS, WEIGHTS, make_adapter
from tests.support.adapter_hooks import hook
from tests.support.assembled import AdapterSources
from tests.support.s3_server import BUCKET, S3Server

FILES = {file.name: file.read_bytes() for file in CAPITALS.iterdir() if file.is_file()}
SIZE = sum(map(len, FILES.values()))
PLACE = f"s3://{BUCKET}/adapters/"
REFRESH = 60.0


@dataclass(frozen=True)
class NotingStore:
    """A store that notes the names it looks up."""

    store: AdapterStore
    looked_up: list[str]

    def look_up(self, name: str) -> StoredAdapter | None:
        """As the store does."""
        self.looked_up.append(name)
        return self.store.look_up(name)

    def fetch(self, found: StoredAdapter, target: Path) -> str:
        """As the store does."""
        return self.store.fetch(found, target)


class Bench:
    """A registry that finds its adapters, and the test's hands on all that is around it."""

    def __init__(self, folder: Path, s3: S3Server) -> None:
        self.s3 = s3
        self.time = 1000.0
        self.looked_up: list[str] = []  # names, once for each call of the store
        self.engine = ScriptedEngine()
        self.environ = {
            **s3.environ,
            "SERVING_DOWNLOAD_DIR": str(folder / "cache"),
            "LMI_S3_CLIENT": "boto3",
        }
        self.sources = AdapterSources(self.environ)
        self.registry = AdapterRegistry(
            self.engine, self.sources.resolve, is_enabled=True, reserved_names=("lmi",)
        )
        self._running = contextlib.ExitStack()

    def open(self, place: str = PLACE, max_bytes: int = 1 << 30) -> OnDemandAdapters:
        """Have the registry find adapters at `place`."""
        self.files = self._running.enter_context(locked_files(place, self.environ, max_bytes))
        store = NotingStore(open_adapter_store(place, self.sources, self.environ), self.looked_up)
        terms = CachePolicy(self.sources.limits, REFRESH, lambda: 5.0)
        found = OnDemandAdapters(self.registry, store, self.files, terms, lambda: self.time)
        self._running.callback(found.close)
        hook(self.registry, find=found.find)
        return found

    def close(self) -> None:
        """Let go of the files."""
        self._running.close()

    def put(self, *names: str, **files: bytes) -> None:
        """Store these adapters."""
        for name in names:
            bodies = {**FILES, **files}
            self.s3.put({f"adapters/{name}/{file}": body for file, body in bodies.items()})

    @property
    def calls(self) -> int:
        """Requests that the store has got, those included that boto3 has sent again."""
        return len(self.s3.signed)

    def loads(self, name: str) -> int:
        """Return the engine's id of the adapter."""
        return self.engine.adapters[name].engine_id


@pytest.fixture
def bench(
    empty_store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """Return a bench over an empty store; nothing is opened yet."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    made = Bench(tmp_path, empty_store)
    yield made
    made.close()


@pytest.fixture
def other_weights(tmp_path: Path) -> Callable[[int], bytes]:
    """Return weights that are unlike those of FILES, and of every other seed."""
    return lambda seed: (make_adapter(tmp_path / str(seed), seed) / WEIGHTS).read_bytes()
