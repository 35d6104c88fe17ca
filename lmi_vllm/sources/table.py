"""The sources of models and adapters: paths, stores, the hub."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from lmi_vllm.sources.base import FetchRequest, Repositories, Source, Store
from lmi_vllm.sources.local import LocalPaths

_LOCAL: Final = LocalPaths()


class Sources:
    """Where models and adapters come from.

    Each of `stores` has one URL scheme. The hub takes what no other source claims.
    """

    def __init__(self, stores: Sequence[Store], hub: Repositories) -> None:
        self.stores = tuple(stores)
        self.hub = hub

    def store_of(self, reference: str) -> Store | None:
        """The store of the URL `reference`; None for any other reference."""
        if _LOCAL.claims(reference):
            return None
        return next((store for store in self.stores if store.claims(reference)), None)

    def source_of(self, reference: str) -> Source:
        """The source of `reference`."""
        return _LOCAL if _LOCAL.claims(reference) else self.store_of(reference) or self.hub

    def fetch_model(self, request: FetchRequest) -> Path:
        """A local directory with the requested model or adapter. Blocks while it fetches.

        Raises:
            DownloadError: the text names the source, the reason and what to do.
        """
        reference, destination = request.reference.strip(), request.destination
        if destination is not None:
            destination = destination.expanduser().absolute()
        request = replace(request, reference=reference, destination=destination)
        return self.source_of(reference).fetch(request)

    def read_text(
        self, reference: str, name: str, environ: Mapping[str, str], revision: str | None = None
    ) -> str | None:
        """One small file of `reference`, before anything is fetched; None without one.

        Raises:
            DownloadError: the source refused, or is unreachable and has no cached copy.
        """
        request = FetchRequest(reference.strip(), environ, revision)
        return self.source_of(request.reference).read_text(request, name)

    def unreadable(self, reference: str, environ: Mapping[str, str]) -> str:
        """Why no store can be asked for `reference`; empty if it can, or is of no store."""
        if (store := self.store_of(reference.strip())) is None:
            return ""
        return store.problem(reference) or store.lacking(reference, environ)

    def require_objects(self, reference: str, environ: Mapping[str, str]) -> None:
        """Raise `NothingThereError` if `reference` is a URL of a store with nothing below it."""
        if (store := self.store_of(reference.strip())) is not None:
            store.require_objects(FetchRequest(reference.strip(), environ))

    def is_store(self, reference: str) -> bool:
        """Whether `reference` is a URL of a store, below which is a whole model directory."""
        return self.store_of(reference.strip()) is not None

    def is_streamed_by_vllm(self, reference: str) -> bool:
        """Whether vLLM's Run:ai loader reads weights from `reference` by itself."""
        store = self.store_of(reference.strip())
        return store is not None and store.is_streamed_by_vllm

    def store_examples(self) -> tuple[str, ...]:
        """Example URLs of stores for messages: a prefix and an archive of each."""
        return tuple(example for store in self.stores for example in store.examples)

    def prefix_examples(self) -> tuple[str, ...]:
        """An example URL of each store."""
        return tuple(store.examples[0] for store in self.stores)

    def unclaimed_reason(self) -> str:
        """The end of a message about a URL that no store has: an example of one."""
        return f"is no URL of a store, such as {self.store_examples()[0]}"
