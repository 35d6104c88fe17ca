"""Where a hub model comes from and goes to, read from the environment it is given.

huggingface_hub reads its variables once, when it is imported. Everything that it takes as an
argument is passed as one, so the mapping decides: endpoint, token, cache directory, offline and the
metadata timeout. What it takes only from the real environment: HF_HUB_DOWNLOAD_TIMEOUT,
HF_HUB_DISABLE_XET, HF_HUB_DISABLE_TELEMETRY, the HF_XET_* variables, and an HF_HUB_OFFLINE=1 that
is set for the process (it cannot be lifted by an argument).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
FAST_TRANSFER: Final = "HF_XET_HIGH_PERFORMANCE"
_TRUE: Final = ("1", "ON", "YES", "TRUE")  # huggingface_hub.constants.ENV_VARS_TRUE_VALUES


@dataclass(frozen=True, slots=True)
class HubRepository:
    """One repository at one revision, how to reach it, and the cache it is kept in."""

    repository: str
    revision: str | None
    endpoint: str
    cache: Path
    is_offline: bool = False
    metadata_timeout_seconds: float = 10.0
    token: str | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """How messages call it."""
        revision = f" (revision {self.revision})" if self.revision else ""
        return f"hub model {self.repository}{revision}"

    @property
    def folder(self) -> Path:
        """The repository's folder in the hub's cache layout."""
        return self.cache / f"models--{self.repository.replace('/', '--')}"


def hub_repository(
    repository: str, revision: str | None, environ: Mapping[str, str], cache: Path | None = None
) -> HubRepository:
    """The source that `environ` describes; `cache` goes before its cache directory."""
    home = _hub_home(environ)
    return HubRepository(
        repository=repository,
        revision=revision,
        endpoint=(environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"),
        cache=(cache or _cache_directory(environ, home)).expanduser().absolute(),
        is_offline=any(
            environ.get(name, "").upper() in _TRUE
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        ),
        metadata_timeout_seconds=_seconds(environ.get("HF_HUB_ETAG_TIMEOUT")),
        token=_token(environ, home),
    )


def fast_transfer(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variable that stands for the switch of the old fast transfer, where that is on."""
    is_on = environ.get("HF_HUB_ENABLE_HF_TRANSFER", "").upper() in _TRUE
    return {FAST_TRANSFER: "1"} if is_on and FAST_TRANSFER not in environ else {}


def _hub_home(environ: Mapping[str, str]) -> Path:
    default = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environ.get("HF_HOME") or default).expanduser()


def _cache_directory(environ: Mapping[str, str], home: Path) -> Path:
    named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named) if named else home / "hub"


def _token(environ: Mapping[str, str], home: Path) -> str | None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := environ.get(name, "").strip():
            return token
    # What `hf auth login` has stored, as vLLM itself would use it.
    stored = Path(environ.get("HF_TOKEN_PATH") or home / "token").expanduser()
    try:
        return stored.read_text().strip() or None
    except OSError:
        return None


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdigit() and int(text) else 10.0
