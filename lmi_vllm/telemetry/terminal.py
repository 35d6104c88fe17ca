"""The last lines of a start, for programs or for people at a terminal."""

import sys
from collections.abc import Mapping, Sequence

from lmi_vllm.telemetry.log_handler import CLEAR, can_draw

_GREEN, _PLAIN = "\x1b[1;32m", "\x1b[0m"


def ready_lines(
    url: str, seconds: float, curl: str, pages: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """Return the last lines of a start, for stdout: two for programs, or a screen for people."""
    ready = f"Ready on {url} after {seconds:.1f} s"
    if not sys.stdout.isatty():
        return [ready, f"Try: {curl}"]
    if can_draw(environ):
        ready = f"{CLEAR}{_GREEN}{ready}{_PLAIN}"
    lines = curl.replace(" -H ", " \\\n    -H ").replace(" -d ", " \\\n    -d ")
    return [ready, f"  {lines}", *(f"  {page}" for page in pages)]
