"""Other replicas, as a registry that shares its adapters knows them."""

from lmi_vllm.adapters.adapter import Adapter


class Others:
    """The other replicas: they have what was confirmed, or refuse to."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.removed: set[str] = set()  # by a call on one of them

    def check(self, name: str) -> None:
        """Allow it."""

    def note(self, name: str, before: Adapter | None) -> None:
        """Wait for the end of the change."""

    def is_removed(self, name: str) -> bool:
        """Whether a call on another one has removed the name."""
        return name in self.removed

    async def refresh(self, name: str) -> None:
        """Note that a call is about to change this name."""
        self.heard.append(("refresh", name))

    async def arrive(self, name: str) -> None:
        """Have all adapters already."""

    async def changed(self, name: str) -> None:
        """Note the change."""
        self.heard.append(("changed", name))

    async def confirm(self, name: str) -> dict[str, str]:
        """Note that a client waits; one name never comes."""
        self.heard.append(("confirm", name))
        return {"b": "has not read the change"} if name == "slow" else {}
