"""A place for one value, which must be filled once."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """Holds one value; a second one is refused by both names."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._values: list[T] = []

    def fill(self, value: T) -> None:
        """Set the value.

        Raises:
            ValueError: it is set.
        """
        if self._values:
            first, second = (_name(one) for one in (self._values[0], value))
            raise ValueError(f"{self._purpose}: {first} and {second} both provide it")
        self._values.append(value)

    @property
    def value(self) -> T:
        """The value.

        Raises:
            ValueError: nothing has set it.
        """
        if not self._values:
            raise ValueError(f"{self._purpose}: nothing provides it")
        return self._values[0]


def _name(value: object) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
