"""LMI's `pair_list`: content of a request or of an answer."""

from collections.abc import Iterable, Mapping
from typing import Any

Pair = tuple[str | None, Any]


class PairList:
    """Pairs of key and value, in the order they were added."""

    def __init__(
        self,
        keys: list[str | None] | None = None,
        values: list[Any] | None = None,
        pair_list: Iterable[Pair] | None = None,
        pair_map: Mapping[str, Any] | None = None,
    ) -> None:
        if keys and values and len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys for {len(values)} values")
        given = zip(keys, values, strict=True) if keys and values else pair_list
        if not given and pair_map:
            given = pair_map.items()
        pairs = [*(given or ())]
        self.keys: list[str | None] = [key for key, _ in pairs]
        self.values: list[Any] = [value for _, value in pairs]

    def add(
        self,
        key: str | None = None,
        value: Any = None,
        index: int | None = None,
        pair: Pair | None = None,
    ) -> None:
        """Append a pair, or insert it at `index`; None is no value, and adds nothing."""
        if pair is not None:
            key, value = pair
        if value is None:
            return
        place = len(self.keys) if index is None else index
        self.keys.insert(place, key)
        self.values.insert(place, value)

    def add_all(self, other: "PairList | None") -> None:
        """Append the pairs of another list."""
        if other is not None:
            self.keys += other.keys
            self.values += other.values

    def size(self) -> int:
        """Return the number of pairs."""
        return len(self.keys)

    def is_empty(self) -> bool:
        """Return whether there is no pair."""
        return not self.keys

    def get(self, key: str | None) -> Any:
        """Return the first value under `key`, None without one."""
        return self.values[self.keys.index(key)] if key in self.keys else None

    def key_at(self, index: int) -> str | None:
        """Return the key at a position."""
        return self.keys[index]

    def value_at(self, index: int) -> Any:
        """Return the value at a position."""
        return self.values[index]

    def get_keys(self) -> list[str | None]:
        """Return all keys."""
        return self.keys

    def get_values(self) -> list[Any]:
        """Return all values."""
        return self.values
