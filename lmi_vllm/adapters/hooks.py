"""What features do about the adapters of a registry: find, keep, share them."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from lmi_vllm.adapters.adapter import Adapter

Publish = Callable[[Collection[Adapter], float], Awaitable[None]]  # adapters, seconds
Find = Callable[[str], Awaitable[bool]]  # name; whether there is such an adapter
OnChange = Callable[[Collection[Adapter]], None]
Forget = Callable[[str], bool]  # name; whether there was something to forget
Begin = Callable[[], Awaitable[None]]


class Sharing(Protocol):
    """Replicates changes of adapters to other servers."""

    def check(self, name: str) -> None:
        """Called before a change of this name, with its lock held; raises to refuse the change."""

    def note(self, name: str, before: Adapter | None) -> None:
        """Called with each change of this name except evictions, with its lock held."""

    def is_removed(self, name: str) -> bool:
        """Whether a call on any server has removed this name, so that it must not be looked up."""

    async def refresh(self, name: str) -> None:
        """Called before a call changes this name: apply what calls on other servers have done."""

    async def arrive(self, name: str) -> None:
        """Called for a name in a request: wait for an adapter registered on another server."""

    async def changed(self, name: str) -> None:
        """Called once a change of this name is complete."""

    async def confirm(self, name: str) -> Mapping[str, str]:
        """Wait for every server; return the reason for each that lacks the change in the end."""


@dataclass(frozen=True, slots=True)
class AdapterHooks:
    """What features do about the adapters of one registry.

    `find` is awaited with each name that a request gives, before the name is looked up. It may
    register the adapter (`is_from_store`), renew it, or refuse the request, and returns whether
    there is one. `on_change` gets all adapters after each change. `forget` is called when a call
    removes a name that is not registered, and drops what is kept of it. `publish` is awaited after
    each change of what requests find. It returns when no request in another process uses another
    load of an adapter, or after a time limit. `begin` is awaited once the adapters of the model
    directory are registered, before requests are answered.
    """

    find: Find | None = None
    on_change: OnChange | None = None
    forget: Forget | None = None
    sharing: Sharing | None = None
    publish: Publish | None = None
    begin: tuple[Begin, ...] = ()

    def __or__(self, other: "AdapterHooks") -> "AdapterHooks":
        """Of each kind the first one, and what both begin with."""
        return AdapterHooks(
            self.find or other.find,
            self.on_change or other.on_change,
            self.forget or other.forget,
            self.sharing or other.sharing,
            self.publish or other.publish,
            self.begin + other.begin,
        )
