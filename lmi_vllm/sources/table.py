"""The sources of models and adapters: paths, stores, the hub.

A store is a row in `Extra.stores`: s3:// is one, of the extra object_stores. A reference that no
other source claims is an id for `Extra.repositories`: the extra hub.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lmi_vllm.extension import extension, extensions
from lmi_vllm.sources.base import (
    FetchRequest,
    Limits,
    ProgressSink,
    Repositories,
    Source,
    Store,
    ignore_progress,
)
from lmi_vllm.sources.local import LocalPaths

_LOCAL: Final = LocalPaths()


def stores() -> tuple[Store, ...]:
    """The stores that extras bring."""
    return tuple(extensions(lambda extra: extra.stores))


def store_of(reference: str) -> Store | None:
    """The store of the URL `reference`; None for any other reference."""
    if _LOCAL.claims(reference):
        return None
    return next((store for store in stores() if store.claims(reference)), None)


def source_of(reference: str) -> Source:
    """The source of `reference`; the hub takes what no other source claims."""
    return _LOCAL if _LOCAL.claims(reference) else store_of(reference) or hub()


def hub() -> Repositories:
    """The hub: the source of what no other source claims."""
    return extension(lambda extra: extra.repositories)


def fetch_model(  # noqa: PLR0913 - one name for each thing that start-up knows
    reference: str,
    *,
    revision: str | None = None,
    environ: Mapping[str, str],
    load_format: str | None = None,
    ignore_patterns: Sequence[str] | None = None,
    download_dir: Path | None = None,
    destination: Path | None = None,
    on_progress: ProgressSink = ignore_progress,
    limits: Limits | None = None,
) -> Path:
    """A local directory with the model or adapter `reference`. Blocks while it fetches.

    `revision`, `ignore_patterns` and `download_dir` (the hub's cache directory) apply to hub ids
    only, and so do the rules for files that are left out. `destination` gets plain files instead of
    a cache, by the same rules. It is renamed when complete, and unchanged while the source is.

    Raises:
        DownloadError: the text names the source, the reason and what to do.
    """
    if destination is not None:
        destination = destination.expanduser().absolute()
    request = FetchRequest(
        reference.strip(), environ, revision, load_format, ignore_patterns, download_dir,
        destination, on_progress, limits,
    )  # fmt: skip
    return source_of(request.reference).fetch(request)


def read_text(
    reference: str, name: str, environ: Mapping[str, str], revision: str | None = None
) -> str | None:
    """One small file of `reference`, before anything is fetched; None without one.

    Raises:
        DownloadError: the source refused, or is unreachable and has no cached copy.
    """
    request = FetchRequest(reference.strip(), environ, revision)
    return source_of(request.reference).read_text(request, name)


def is_store(reference: str) -> bool:
    """Whether `reference` is a URL of a store, below which is a whole model directory."""
    return store_of(reference.strip()) is not None


def is_streamed_by_vllm(reference: str) -> bool:
    """Whether vLLM's Run:ai loader reads weights from `reference` by itself."""
    store = store_of(reference.strip())
    return store is not None and store.is_streamed_by_vllm


def unclaimed_reason() -> str:
    """The end of a message about a URL that no store has: an example of one."""
    return f"is no URL of a store, such as {store_examples()[0]}"


def store_examples() -> tuple[str, ...]:
    """Example URLs of stores for messages: a prefix and an archive of each."""
    return tuple(example for store in stores() for example in store.examples)
