"""The ordered content of an `Input` or `Output`: keys may repeat, or be None."""


class PairList:
    """Pairs of key and bytes, in the order they were added."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.values: list[bytes] = []

    def add(self, key: str | None = None, value: bytes = b"") -> None:
        """Append a pair."""
        self.keys.append(key)
        self.values.append(value)

    def size(self) -> int:
        """Return the number of pairs."""
        return len(self.keys)

    def is_empty(self) -> bool:
        """Return whether there is none."""
        return not self.keys

    def get(self, key: str | None) -> bytes | None:
        """Return the first value under `key`, None without one."""
        return self.values[self.keys.index(key)] if key in self.keys else None

    def key_at(self, index: int) -> str | None:
        """Return the key at a position."""
        return self.keys[index]

    def value_at(self, index: int) -> bytes:
        """Return the value at a position."""
        return self.values[index]

    def get_keys(self) -> list[str | None]:
        """Return all keys."""
        return self.keys

    def get_values(self) -> list[bytes]:
        """Return all values."""
        return self.values
