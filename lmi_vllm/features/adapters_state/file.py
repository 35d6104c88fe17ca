"""The file that persists adapters across restarts: their registrations, never weights.

An adapter that cannot be restored does not stop a start. The others are registered, and the log
names it. Its source may only be unreachable for an hour, so its entry stays in the file until a
call removes its name, or registers it again.
"""

import json
import logging
import os
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import LmiError, ModelSourceError

logger = logging.getLogger(__name__)

STATE_VERSION: Final = 1


class AdapterStateFile:
    """The state file: registered adapters, and entries that could not be restored at this start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unrestored: dict[str, Adapter] = {}
        self._is_restored = False

    async def restore(self, registry: AdapterRegistry) -> None:
        """Register every adapter of the file.

        Raises:
            ModelSourceError: the file cannot be read.
        """
        for adapter in read_state(self._path):
            await self._restore_one(registry, adapter)
        self._is_restored = True

    def keep(self, adapters: Collection[Adapter]) -> None:
        """Write the file; local adapters and those found on demand are left out."""
        if not self._is_restored:
            return
        kept = {
            adapter.name: adapter
            for adapter in adapters
            if not (adapter.is_local or adapter.is_from_store)
        }
        self._unrestored = {
            name: adapter for name, adapter in self._unrestored.items() if name not in kept
        }
        write_state(self._path, [*kept.values(), *self._unrestored.values()])

    def forget(self, name: str) -> bool:
        """Forget an entry that could not be restored; whether there was one. `keep` writes it."""
        return self._unrestored.pop(name, None) is not None

    async def _restore_one(self, registry: AdapterRegistry, adapter: Adapter) -> None:
        try:
            await registry.register(adapter)
        except LmiError as error:
            logger.error(
                "adapters_state %s: adapter %s could NOT be restored: %s; its entry stays until "
                "DELETE /adapters/%s",
                self._path,
                adapter.name,
                error.text,
                quote(adapter.name, safe=""),
            )
            self._unrestored[adapter.name] = adapter


def read_state(path: Path) -> list[Adapter]:
    """Return the adapters of the file, none where there is no file.

    Raises:
        ModelSourceError: it cannot be read; a start would overwrite it.
    """
    try:
        if not path.exists():
            return []
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != STATE_VERSION:
            raise ValueError(f"version {document['version']} is not known here")
        return [adapter_of(entry) for entry in document["adapters"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(
            f"option.adapters_state {path} cannot be read ({type(error).__name__}: {error}). "
            "Repair it, or remove it to start without its adapters"
        ) from error


def write_state(path: Path, adapters: Collection[Adapter]) -> None:
    """Replace the file atomically; a disk error is logged, and the adapters stay registered."""
    entries = [entry_of(adapter) for adapter in adapters]
    text = json.dumps({"version": STATE_VERSION, "adapters": entries}, indent=2) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        logger.error(
            "adapters_state %s cannot be written; adapters registered now will be missing after "
            "the next start: %s",
            path,
            error,
        )


def entry_of(adapter: Adapter) -> dict[str, Any]:
    """Return the JSON object that is kept of an adapter."""
    return {
        "name": adapter.name,
        "src": adapter.src,
        "preload": adapter.preload,
        "pin": adapter.pin,
        "options": dict(adapter.options),
    }


def adapter_of(entry: Mapping[str, Any], revision: str = "") -> Adapter:
    """Return the adapter of a kept entry, not loaded; without `revision` it is given a new one."""
    options = {str(name): str(value) for name, value in entry.get("options", {}).items()}
    return Adapter(
        name=str(entry["name"]),
        src=str(entry["src"]),
        preload=bool(entry.get("preload", True)),
        pin=bool(entry.get("pin", False)),
        options=MappingProxyType(options),
        revision=revision or uuid.uuid4().hex,
    )
