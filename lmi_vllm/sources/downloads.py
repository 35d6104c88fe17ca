"""Models and adapters fetched from wherever their reference points, as local directories.

Sources: an existing path (returned as it is, no network), `s3://bucket/prefix` or an archive there,
and otherwise a hub id. Each source has a module; this one only chooses.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.download_to import fetch_model_to
from lmi_vllm.sources.hub.download import fetch_from_hub
from lmi_vllm.sources.hub.location import hub_source
from lmi_vllm.sources.progress import DownloadProgress, ProgressSink, ignore_progress
from lmi_vllm.sources.s3.download import fetch_from_s3, fetch_text_from_s3
from lmi_vllm.sources.s3.store import SCHEME

__all__ = ["DownloadProgress", "ProgressSink", "fetch_model", "fetch_model_to", "fetch_text"]


def fetch_model(  # noqa: PLR0913 - one name for each thing that start-up knows
    reference: str,
    *,
    revision: str | None = None,
    environ: Mapping[str, str],
    load_format: str | None = None,
    ignore_patterns: Sequence[str] | None = None,
    download_dir: Path | None = None,
    on_progress: ProgressSink = ignore_progress,
) -> Path:
    """A local directory with the model or adapter that `reference` names. Blocks while it fetches.

    `revision`, `ignore_patterns` and `download_dir` (the hub's cache directory) apply to hub ids
    only, as do the rules which files are left out.

    Raises:
        DownloadError: the text names the source, the reason and what to do.
    """
    reference = reference.strip()
    if Path(reference).exists():
        return Path(reference)
    if reference.startswith(SCHEME):
        return fetch_from_s3(reference, environ, load_format, on_progress)
    if reference.startswith(("/", ".", "~")):
        raise DownloadError(f"{reference} does not exist: check the path of the model")
    source = hub_source(reference, revision, environ, download_dir)
    return fetch_from_hub(source, load_format, ignore_patterns, on_progress)


def fetch_text(reference: str, environ: Mapping[str, str]) -> str | None:
    """The text of one small object or local file, None when there is none.

    Raises:
        DownloadError: the store refused, or is unreachable and has no cached copy.
    """
    if reference.startswith(SCHEME):
        return fetch_text_from_s3(reference, environ)
    path = Path(reference)
    return path.read_text() if path.is_file() else None
