"""The compile cache of a start: restored before the engine starts, saved after (LMI_CACHE_URI).

vLLM, Inductor and Triton are pointed at one folder of this start's key. It is filled from the store
before the engine starts and saved there once the model is ready. No failure of it fails a start: it
is logged as one warning, and the engine compiles (DECISIONS.md 61).
"""

import asyncio
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import LmiError
from lmi_vllm.features.compile_cache.archive import (
    SUFFIX,
    Manifest,
    UnusableEntryError,
    caches_of,
    files_in,
    move_in,
    pack,
    read_manifest,
    unpack,
    write_manifest,
)
from lmi_vllm.features.compile_cache.folders import (
    OURS,
    VLLM,
    compiled_code_exports,
    compiled_code_folder,
)
from lmi_vllm.features.compile_cache.key import cache_key, key_parts
from lmi_vllm.features.compile_cache.start_times import StartTimes, start_times
from lmi_vllm.features.compile_cache.store import (
    ABANDONED_SECONDS,
    CacheStore,
    CompileCacheSettings,
    open_cache_store,
)
from lmi_vllm.features.transfer import without_secrets
from lmi_vllm.private_folders import new_private_folder
from lmi_vllm.server.start_parts import PlannedStart
from lmi_vllm.sources.base import InterruptedTransferError, UnreachableError
from lmi_vllm.sources.disk import human_size

logger = logging.getLogger(__name__)

SETTING: Final = "LMI_CACHE_URI"
LOWEST_PRIORITY: Final = 19
# Compiling takes about as long: a restore that is not done by then is abandoned.
RESTORE_SECONDS: Final = 60.0
# The subfolder that each of these libraries is given; a variable that is set is left alone.
FOLDERS: Final[Mapping[str, str]] = MappingProxyType(
    {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
)
# Inductor's precompiled C++ header is 156 of the 158 MB of an entry, and each start wants it, also
# where nothing is left to compile. Part of vLLM's own key: the saver has to do without it, too.
_NO_PRECOMPILED_HEADER: Final = ("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
_FAILURES: Final = (
    LmiError, UnusableEntryError, InterruptedTransferError, OSError, UnreachableError,
)  # fmt: skip


class CompileCache:
    """The compile cache of one start: its local folder, its entry in the store, its outcome."""

    def __init__(
        self,
        store: CacheStore,
        place: Path,
        parts: Mapping[str, object],
        environ: Mapping[str, str],
    ) -> None:
        # The libraries read these variables when they are imported, so they are set before.
        folders = {name: str(place / folder) for name, folder in FOLDERS.items()}
        self.exports = MappingProxyType(
            {
                name: value
                for name, value in (*folders.items(), _NO_PRECOMPILED_HEADER)
                if name == "VLLM_CACHE_ROOT" or not environ.get(name)
            }
        )
        self._store = store
        self._place = place
        self._key = key = cache_key(parts)
        self._parts = parts
        self._name = f"{key}{SUFFIX}"
        self._is_refused = False  # the store is not trusted: it is neither read nor written
        self._is_damaged = False  # the entry in the store cannot be used, and is replaced
        # A restore that still runs then must not touch the folder.
        self._has_timed_out = threading.Event()
        self._is_saving = False

    async def before_engine(self, seconds: float = RESTORE_SECONDS) -> None:
        """Fill the folder from the store within `seconds`, unless it is filled; log failures."""
        try:
            await asyncio.wait_for(asyncio.to_thread(self._restore), seconds)
        except TimeoutError:
            self._has_timed_out.set()
            self._warn("NOT restored", f"{seconds:g} s were not enough")

    def after_ready(self) -> threading.Thread | None:
        """Save what this start compiled, once; return the daemon thread, None without one."""
        if self._is_refused or self._is_saving:
            return None
        self._is_saving = True
        thread = threading.Thread(target=self._save, name="save-compile-cache", daemon=True)
        thread.start()
        return thread

    def _restore(self) -> None:
        began = time.monotonic()
        try:
            found = read_manifest(self._place)
            if found is not None and found.key == self._key:
                logger.info("compile cache: %s is filled already", self._place)
                return
            manifest = self._fetch()
        except _FAILURES as error:
            self._record_failure(error)
            return
        if self._has_timed_out.is_set():
            return
        if manifest is None:
            logger.info(
                "compile cache: nothing at %s for this model, machine, vLLM and engine arguments "
                "(key %s): what this start makes is saved there", self._store.shown, self._key,
            )  # fmt: skip
            return
        self._log_result("restored from", manifest, time.monotonic() - began)

    def _fetch(self) -> Manifest | None:
        with new_private_folder(".restore-", self._place.parent) as scratch:
            archive = self._store.fetch(self._name, scratch.path)
            if archive is None:
                return None
            ready = scratch.path / "ready"
            try:
                manifest = unpack(archive, ready, self._key, f"{self._store.shown}/{self._name}")
            except UnusableEntryError:
                self._is_damaged = True
                raise
            if self._has_timed_out.is_set():
                return None
            move_in(ready, self._place)
        return manifest

    def _record_failure(self, error: BaseException) -> None:
        """Log why nothing was restored; a store that other users can write is not used any more."""
        self._is_refused = isinstance(error, UnusableEntryError) and not self._is_damaged
        self._warn("NOT restored", error)

    def _warn(self, what: str, reason: object) -> None:
        text = mask_urls(without_secrets(str(reason)))
        logger.warning("compile cache: %s, %s %s: %s", what, SETTING, self._store.shown, text)

    def _log_result(self, what: str, manifest: Manifest, seconds: float) -> None:
        fields = {
            "key": self._key,
            "files": len(manifest.files),
            "bytes": manifest.total_bytes,
            "seconds": round(seconds, 3),
        }
        logger.info(
            "compile cache: %s %s: %d files, %s in %.1f s (key %s)",
            what,
            self._store.shown,
            len(manifest.files),
            human_size(manifest.total_bytes),
            seconds,
            self._key,
            extra={"fields": {"compile_cache": fields}},
        )

    def _save(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        began = time.monotonic()
        try:
            if not self._has_news():
                return
            with new_private_folder(".save-", self._place.parent) as scratch:
                archive = scratch.path / self._name
                manifest = pack(self._place, archive, self._key, self._parts)
                self._store.put(self._name, archive)
            write_manifest(manifest, self._place)
        except _FAILURES as error:
            self._warn("NOT saved", error)
        else:
            self._log_result("saved to", manifest, time.monotonic() - began)

    def _has_news(self) -> bool:
        """Whether the store lacks what this start had to compile."""
        made = caches_of(files_in(self._place))
        if not made:
            return False
        if self._is_damaged:
            return True
        known = read_manifest(self._place)
        # vLLM found nothing of what was restored fit to use, or not all: the model has changed
        # under its name, or a variable that vLLM alone knows of.
        is_outdated = known is not None and not made <= known.caches
        return is_outdated or not self._store.has(self._name)


@dataclass(frozen=True, slots=True)
class KeptCode:
    """Where one start keeps compiled code, its compile cache where that is used, and its time."""

    exports: Mapping[str, str]
    cache: CompileCache | None
    times: StartTimes | None = None

    async def before_engine(self) -> None:
        """Read how long the last start took, and restore what another one compiled."""
        if self.times is not None:
            await self.times.read()
        if self.cache is not None:
            await self.cache.before_engine()

    def after_ready(self) -> None:
        """Save how long this start took, and what it compiled."""
        if self.times is not None:
            self.times.write()
        if self.cache is not None:
            self.cache.after_ready()


def kept_code(start: PlannedStart) -> KeptCode:
    """Return the folders of this user alone; the compile cache's own come first.

    Raises:
        StartupError: there is no safe folder; the text says what to set.
    """
    environ = {**start.environ, **start.settings.environment_exports}
    exports = compiled_code_exports(environ)
    times = start_times(start, Path({**environ, **exports}[VLLM]).expanduser())
    cache = compile_cache(start)
    return KeptCode({**exports, **(cache.exports if cache else {})}, cache, times)


def compile_cache(start: PlannedStart) -> CompileCache | None:
    """Return the cache of this start; None where it is not set, not allowed or not usable."""
    uri = start.settings.feature(CompileCacheSettings).lmi_cache_uri
    is_secure = start.settings.server.sagemaker_secure_mode
    if not uri or start.engine != "vllm" or is_secure:
        return None
    environ = {**start.environ, **start.settings.environment_exports}
    try:
        parts = key_parts(start.model, start.arguments, environ)
        place = compiled_code_folder(environ) / OURS / cache_key(parts)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_abandoned(place.parent)
        store = open_cache_store(str(uri), environ, start.sources)
        return CompileCache(store, place, parts, environ)
    except (LmiError, OSError) as error:
        logger.warning("compile cache: NOT used, %s: %s", SETTING, mask_urls(str(error)))
        return None


def _remove_abandoned(folder: Path) -> None:
    """Remove scratch folders of processes that were killed."""
    for path in folder.glob(".*-*"):
        if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
