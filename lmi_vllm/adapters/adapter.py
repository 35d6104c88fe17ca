"""One registered adapter, and the file that keeps adapters from one start to the next.

The file holds what clients gave, never weights. Off unless `option.adapters_state` names it.
"""

import json
import logging
import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.errors import AdapterRefusedError, ModelSourceError
from lmi_vllm.inference.hooks import NO_HOOKS, Hooks
from lmi_vllm.messages import AdapterRef

logger = logging.getLogger(__name__)

STATE_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Adapter:
    """A registered adapter: `src` as given, `path` on disk; preload and pin as requested.

    `ref` is there while its weights are loaded; `hooks` are those of its own model.py. `options`
    are the other parameters of its registration, kept and otherwise unused. Adapters found in the
    model directory are `is_local`: they come back by themselves at the next start. Those that an
    extra brought in since a request named them are `is_found`: it has checked the files at `path`.
    """

    name: str
    src: str
    preload: bool = True
    pin: bool = False
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    is_local: bool = False
    is_found: bool = False
    # Of these weights under this name: another registration has another, an update the same.
    revision: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    path: str = ""
    ref: AdapterRef | None = None
    hooks: Hooks = NO_HOOKS

    def check_flags(self) -> None:
        """Return when the flags go together.

        Raises:
            AdapterRefusedError: it is to be pinned, but not loaded.
        """
        if self.pin and not self.preload:
            raise AdapterRefusedError(
                f"Adapter {self.name}: pin=true needs preload=true; it is impossible to pin an "
                "adapter that is not loaded"
            )

    def updated(self, wanted: "Adapter") -> "Adapter":
        """Return this adapter with the preload, pin and options of `wanted`.

        Raises:
            AdapterRefusedError: nothing else may change, and a pin stays.
        """
        wanted.check_flags()
        if wanted.src != self.src:
            raise AdapterRefusedError("Updating adapter path is not supported.")
        if self.pin and not wanted.pin:
            raise AdapterRefusedError(
                "Unpinning adapter is not supported. Unregister the adapter and register it "
                "again without pin."
            )
        return replace(self, preload=wanted.preload, pin=wanted.pin, options=wanted.options)


def read_state(path: Path) -> list[Adapter]:
    """Return the adapters of the file, none where there is no file.

    Raises:
        ModelSourceError: it cannot be read; starting all the same would write over it.
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
    """Replace the file at once; a disk that refuses is logged, the adapters go on working."""
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
    """Return what is kept of an adapter."""
    return {
        "name": adapter.name,
        "src": adapter.src,
        "preload": adapter.preload,
        "pin": adapter.pin,
        "options": dict(adapter.options),
    }


def adapter_of(entry: Mapping[str, Any], revision: str = "") -> Adapter:
    """Return the adapter that was kept, not loaded; a new registration without a revision."""
    options = {str(name): str(value) for name, value in entry.get("options", {}).items()}
    return Adapter(
        name=str(entry["name"]),
        src=str(entry["src"]),
        preload=bool(entry.get("preload", True)),
        pin=bool(entry.get("pin", False)),
        options=MappingProxyType(options),
        revision=revision or uuid.uuid4().hex,
    )
