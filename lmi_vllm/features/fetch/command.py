"""`lmi-vllm fetch MODEL`: the server's own download as a command, for images and init containers.

The directory is the only thing on stdout; progress and errors go to stderr.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TextIO

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import DownloadProgress, FetchRequest
from lmi_vllm.sources.disk import human_size
from lmi_vllm.sources.local import MANIFEST_NAME
from lmi_vllm.sources.table import Sources
from lmi_vllm.translate.configuration import Configuration

SECONDS_BETWEEN_LINES: Final = 5.0
_BAR_CELLS: Final = 24


def add_arguments(parser: argparse.ArgumentParser, configuration: Configuration) -> None:
    """Declare the arguments of `fetch` on `parser`."""
    parser.add_argument("model", metavar="MODEL", help=_model_forms(configuration.sources))
    parser.add_argument(
        "--to", metavar="DIR", type=Path, help="place the model there instead of in the cache"
    )
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub model")
    parser.add_argument(
        "--load-format", metavar="F", help="vLLM's load_format, which decides the weights to fetch"
    )


def _model_forms(sources: Sources) -> str:
    """Return the accepted forms of MODEL, for the help text."""
    return ", ".join(filter(None, ("hub id", " or ".join(sources.store_examples()))))


def run(
    arguments: argparse.Namespace, environ: Mapping[str, str], configuration: Configuration
) -> int:
    """Fetch the model and print its directory; return 0, raise `DownloadError` on failure."""
    display = ProgressDisplay(sys.stderr)
    if arguments.to is not None:
        _require_usable(arguments.to.expanduser().absolute())
    try:
        request = FetchRequest(
            arguments.model,
            environ,
            arguments.revision,
            arguments.load_format,
            destination=arguments.to,
            on_progress=display.show,
        )
        directory = configuration.sources.fetch_model(request)
    except DownloadError as error:
        raise DownloadError(mask_urls(error.text)) from None
    finally:
        display.close()
    sys.stdout.write(f"{directory}\n")
    return 0


def _require_usable(destination: Path) -> None:
    if not destination.exists():
        return
    if os.path.ismount(destination):
        raise DownloadError(
            f"{destination} is a mount point, which cannot be replaced when the model is complete: "
            f"name a directory below it, such as {destination / 'model'}"
        )
    if not destination.is_dir() or (
        any(destination.iterdir()) and not (destination / MANIFEST_NAME).exists()
    ):
        raise DownloadError(
            f"{destination} is not empty and was not made by lmi-vllm fetch: name another directory"
        )


def text_of(progress: DownloadProgress) -> str:
    """Return a line of text: files, bytes, rate and time left."""
    percent = 100 * progress.bytes // progress.bytes_total if progress.bytes_total else 100
    left = "" if progress.seconds_left is None else f", {progress.seconds_left:.0f} s left"
    return (
        f"{percent}% of {human_size(progress.bytes_total)}, {progress.files} of "
        f"{progress.files_total} files, {human_size(progress.bytes_per_second)}/s{left}"
    )


class ProgressDisplay:
    """A bar on a terminal, elsewhere one line every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._next_line = 0.0
        self._has_bar = False

    def show(self, progress: DownloadProgress) -> None:
        """Show `progress`, at once on a terminal."""
        is_done = progress.files == progress.files_total
        if self._is_terminal:
            filled = _BAR_CELLS * progress.bytes // max(1, progress.bytes_total)
            bar = "#" * filled + "." * (_BAR_CELLS - filled)
            self._stream.write(f"\r\x1b[K[{bar}] {text_of(progress)}")
            self._has_bar = True
        elif is_done or time.monotonic() >= self._next_line:
            self._stream.write(f"Fetching: {text_of(progress)}\n")
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        self._stream.flush()

    def close(self) -> None:
        """End the line of the progress bar, if there is one."""
        if self._has_bar:
            self._stream.write("\n")
