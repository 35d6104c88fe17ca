"""The state object that replicas share, and each replica's report beside it; calls here block."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.errors import ModelSourceError
from lmi_vllm.features.adapters_state.file import adapter_of, entry_of
from lmi_vllm.sources.base import ObjectChangedError, ObjectStore

VERSION: Final = 1
_NO_REASONS: Final[Mapping[str, Any]] = MappingProxyType({})
LIVE_SECONDS: Final = 60.0
FORGOTTEN_SECONDS: Final = 24 * 3600.0
MAX_REMOVED: Final = 10_000
REMOVED_SECONDS: Final = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ReplicatedAdapters:
    """The adapters that all replicas are to have; `generation` counts the writes.

    `removed` has the names that no replica looks up in a store of adapters, and since when.
    """

    adapters: Mapping[str, Adapter] = field(default_factory=lambda: MappingProxyType({}))
    generation: int = 0
    removed: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def read(cls, content: bytes, place: str) -> "ReplicatedAdapters":
        """Return the parsed object.

        Raises:
            ModelSourceError: it is no such object, so it must not be overwritten.
        """
        try:
            document = json.loads(content)
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']} is not known here")
            entries = document["adapters"]
            adapters = [adapter_of(entry, str(entry["revision"])) for entry in entries]
            removed = {str(one): float(at) for one, at in document.get("removed", {}).items()}
            return cls({one.name: one for one in adapters}, int(document["generation"]), removed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelSourceError(
                f"option.adapters_state {place} cannot be read ({type(error).__name__}: {error}). "
                "Repair it, or remove it to begin without its adapters"
            ) from error

    def encoded(self) -> bytes:
        """Return the object's content: JSON with a line for each of maybe thousands of adapters."""
        head = {"version": VERSION, "generation": self.generation, "removed": dict(self.removed)}
        lines = (json.dumps(entry_of(one) | {"revision": one.revision})
                 for one in self.adapters.values())  # fmt: skip
        adapters = ",\n".join(lines)
        return f'{json.dumps(head)[:-1]}, "adapters": [\n{adapters}\n]}}\n'.encode()

    def is_removed(self, name: str) -> bool:
        """Whether a call has removed the name, and none has registered it within the time."""
        return time.time() < self.removed.get(name, 0.0) + REMOVED_SECONDS

    def with_changes(
        self, changes: Mapping[str, Adapter | None], *, is_removal_kept: bool
    ) -> "ReplicatedAdapters":
        """Return the next generation: with these adapters, without those that are None."""
        merged = {**self.adapters, **changes}
        kept = {name: adapter for name, adapter in merged.items() if adapter is not None}
        removed = {
            name: at
            for name, at in self.removed.items()
            if name not in changes and self.is_removed(name)
        }
        if is_removal_kept:
            removed |= {name: time.time() for name, new in changes.items() if new is None}
        newest = dict([*removed.items()][-MAX_REMOVED:])
        return ReplicatedAdapters(kept, self.generation + 1, newest)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The status of one replica: its generation, and the adapters it lacks, with reasons."""

    generation: int
    missing: Mapping[str, str]


class StateObject:
    """The shared object, and the reports of replicas below `<key>.replicas/`."""

    def __init__(self, folder: ObjectStore, name: str, replica: str) -> None:
        self.place = f"{folder.listed_url}{name}"
        self.replica = replica
        self._folder = folder
        self._name = name
        self._reports = folder.below(f"{name}.replicas")
        self._report_name = f"{replica}.json"
        self._etag = ""

    @property
    def is_known(self) -> bool:
        """Whether the object was there at the last read or write."""
        return bool(self._etag)

    def read(self) -> ReplicatedAdapters | None:
        """Return the object; None where it has not changed since the last read, or is missing."""
        content, etag = self._folder.read_newer(self._name, self._etag)
        shared = None if content is None else ReplicatedAdapters.read(content, self.place)
        self._etag = etag
        return shared

    def write(self, shared: ReplicatedAdapters) -> None:
        """Replace the version that was read last (compare and swap by ETag).

        Raises:
            ObjectChangedError: another replica was faster: read again.
        """
        self._etag = self._folder.write(self._name, shared.encoded(), self._etag)

    def check_conditions(self) -> None:
        """Check that the store obeys `If-Match`, by a write that has to be refused.

        Raises:
            ModelSourceError: it does not, so that replicas would undo each other's changes.
        """
        try:
            self._reports.write(self._report_name, b"{}", "1")  # a generation in Google's store
        except ObjectChangedError:
            return
        raise ModelSourceError(
            f"option.adapters_state {self.place}: the store ignores If-Match. Replicas would write "
            "over each other's changes; choose a store with conditional writes"
        )

    def report(self, report: ReplicaReport) -> None:
        """Write this replica's report."""
        content = {"generation": report.generation, "missing": dict(report.missing)}
        self._reports.write(self._report_name, json.dumps(content).encode())

    def live_reports(self) -> dict[str, ReplicaReport]:
        """Return the reports by name of the other replicas that reported within `LIVE_SECONDS`.

        Ages are by the store's clock. Reports older than `FORGOTTEN_SECONDS` are deleted.
        """
        listed = {stored.name: stored for stored in self._reports.list_objects()}
        newest = max((stored.modified for stored in listed.values()), default=0.0)
        found: dict[str, ReplicaReport] = {}
        for name, stored in listed.items():
            age = newest - stored.modified
            if age > FORGOTTEN_SECONDS:
                self._reports.delete(name)
            replica = name.removesuffix(".json")
            if age > LIVE_SECONDS or replica == self.replica:
                continue
            if (content := self._reports.read(name)) is not None:
                found[replica] = _report(content)
        return found

    def leave(self) -> None:
        """Delete this replica's report."""
        self._reports.delete(self._report_name)


def _report(content: bytes) -> ReplicaReport:
    """Return the parsed report; one that cannot be read counts as of generation -1."""
    try:
        document = json.loads(content)
        return ReplicaReport(int(document["generation"]), dict(document["missing"]))
    except (ValueError, KeyError, TypeError):
        return ReplicaReport(-1, _NO_REASONS)
