"""An entry point that is a URL: fetched once into the cache as model.py."""

import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.storage import cache_directory

TIMEOUT_SECONDS: Final = 60
MAX_BYTES: Final = 16 << 20


def fetch_entry_point(url: str, environ: Mapping[str, str]) -> Path:
    """Return the file of an http(s) URL, from the cache if it is there.

    Raises:
        DownloadError: it cannot be fetched; the text names URL and reason.
    """
    target = cache_directory(f"entry-point:{url}", environ) / "model.py"
    if target.is_file():
        return target
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            content = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:  # a kind of URLError; its own text has the status
        raise _cannot_be_fetched(url, error) from error
    except urllib.error.URLError as error:
        raise _cannot_be_fetched(url, error.reason) from error
    except (OSError, ValueError) as error:
        raise _cannot_be_fetched(url, error) from error
    if len(content) > MAX_BYTES:
        raise DownloadError(f"entryPoint {mask_urls(url)} is larger than {MAX_BYTES} bytes")
    target.parent.mkdir(parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(dir=target.parent, prefix=".entry-point-")
    with os.fdopen(file, "wb") as partial:
        partial.write(content)
    Path(name).rename(target)
    return target


def _cannot_be_fetched(url: str, reason: object) -> DownloadError:
    return DownloadError(f"entryPoint {mask_urls(url)} cannot be fetched: {reason}")
