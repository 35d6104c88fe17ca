"""Sessions in a store of objects: what one replica creates or closes, every replica knows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import InterruptedTransferError, ObjectStore, UnreachableError
from lmi_vllm.sources.table import store_of

AWAY: Final = (UnreachableError, InterruptedTransferError, DownloadError)
FILE: Final = ".session.json"


@dataclass(frozen=True, slots=True)
class SharedSessions:
    """The small objects below `option.sessions_s3url`; every call blocks, and may raise `AWAY`."""

    store: ObjectStore

    def put(self, name: str, expires: float) -> None:
        """Have every replica know the session."""
        self.store.write(f"{name}/{FILE}", orjson.dumps({"expires": expires}))

    def expiry(self, name: str) -> float | None:
        """Return when the session expires; None where there is none, or none that can be read."""
        content = self.store.read(f"{name}/{FILE}")
        try:
            return None if content is None else float(orjson.loads(content)["expires"])
        except (ValueError, TypeError, KeyError):
            return None

    def delete(self, name: str) -> None:
        """Have no replica know the session."""
        self.store.delete(f"{name}/{FILE}")


def shared_sessions(url: str | None, environ: Mapping[str, str]) -> SharedSessions | None:
    """Return the sessions below the URL; None without one, or where it names no store."""
    store = store_of(url.strip()) if url else None
    if store is None or url is None:
        return None
    return SharedSessions(store.make_store(f"{url.strip().rstrip('/')}/", environ))
