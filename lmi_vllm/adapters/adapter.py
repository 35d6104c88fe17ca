"""One registered adapter."""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final
from urllib.parse import quote

from lmi_vllm.errors import AdapterRefusedError, BadParameterError
from lmi_vllm.hooks import NO_HOOKS, Hooks
from lmi_vllm.messages import AdapterRef

LONGEST_NAME: Final = 4096  # percent-encoded; a request's path has 8190 bytes
LONGEST_SOURCE: Final = 8192
MOST_OPTIONS: Final = 65536  # characters
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A registered adapter: `src` as given, `path` on disk; preload and pin as requested.

    `ref` is set while its weights are loaded. `hooks` are those of its own model.py. `options` are
    the other parameters of its registration, which the server keeps and does not use. An adapter of
    the model directory is `is_local`: the next start registers it again. With `is_from_store` an
    feature registered it because a request named it, and has checked `path`. `version`
    identifies the files that were read.
    """

    name: str
    src: str
    preload: bool = True
    pin: bool = False
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    is_local: bool = False
    is_from_store: bool = False
    # Identifies one registration of one name; an update keeps it unless it reads changed files.
    revision: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    path: str = ""
    version: str = field(default="", compare=False)
    ref: AdapterRef | None = None
    hooks: Hooks = NO_HOOKS

    def check_name(self) -> None:
        """Check that every way to name it in a request can carry its name.

        HTTP strips a header's value: it would name another adapter, or the base model. A path is
        bounded: the adapter could not be removed.

        Raises:
            BadParameterError: the name begins or ends with white space, has a control character or
                is too long.
        """
        if self.name != self.name.strip():
            raise BadParameterError(
                f"name: {self.name!r:.200} begins or ends with white space, which a header that "
                "names the adapter cannot carry"
            )
        if _CONTROL.search(self.name):
            raise BadParameterError(
                f"name: {self.name!r:.200} has a control character, which no header can carry"
            )
        if len(quote(self.name, safe="", errors="replace")) > LONGEST_NAME:
            raise BadParameterError(
                f"name: {self.name!r:.80} is too long for the path of a request: at most "
                f"{LONGEST_NAME} characters, percent-encoded"
            )

    def check_size(self) -> None:
        """Check that what is kept of it, and shown to every client, is small.

        Raises:
            BadParameterError: the source or the other parameters are too long.
        """
        if len(self.src) > LONGEST_SOURCE:
            raise BadParameterError(f"src: at most {LONGEST_SOURCE} characters are allowed")
        if sum(len(name) + len(text) for name, text in self.options.items()) > MOST_OPTIONS:
            raise BadParameterError(
                "parameters without an effect are kept with the adapter: all of them may have "
                f"{MOST_OPTIONS} characters"
            )

    def check_flags(self) -> None:
        """Check that the flags can be combined.

        Raises:
            AdapterRefusedError: pin is set without preload.
        """
        if self.pin and not self.preload:
            raise AdapterRefusedError(
                f"Adapter {self.name}: pin=true needs preload=true; it is impossible to pin an "
                "adapter that is not loaded"
            )

    def as_read_again(self) -> "Adapter":
        """Return a copy that is not loaded, for files that have changed."""
        return replace(self, ref=None, revision=uuid.uuid4().hex)

    def updated(self, wanted: "Adapter") -> "Adapter":
        """Return a copy with the preload, pin and options of `wanted`.

        Raises:
            AdapterRefusedError: `wanted` changes something else, or removes the pin.
        """
        wanted.check_flags()
        wanted.check_size()
        if wanted.src != self.src:
            raise AdapterRefusedError("Updating adapter path is not supported.")
        if self.pin and not wanted.pin:
            raise AdapterRefusedError(
                "Unpinning adapter is not supported. Unregister the adapter and register it "
                "again without pin."
            )
        return replace(self, preload=wanted.preload, pin=wanted.pin, options=wanted.options)
