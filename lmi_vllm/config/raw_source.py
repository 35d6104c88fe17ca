"""The two kinds of pydantic-settings sources: texts of one origin, and the fields made of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from lmi_vllm.config.setting import Layers, RawValue


class RawSource(PydanticBaseSettingsSource):
    """One kind of origin: the texts that it sets. `name` is unique in an order."""

    def __init__(self, name: str, values: Iterable[RawValue]) -> None:
        super().__init__(BaseSettings)
        self.__name__ = name  # key of a source's texts in pydantic-settings
        self.values = tuple(values)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Unused: `__call__` hands over all keys at once."""
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        """The keys, in the form that pydantic-settings merges."""
        return {"texts": {raw.key: raw for raw in self.values}}


class Reading(RawSource):
    """The last source: makes the fields from the texts of the sources before it."""

    def __init__(self, read: Callable[[Layers], Mapping[str, object]]) -> None:
        super().__init__("reading", ())
        self.read = read

    def __call__(self) -> dict[str, Any]:
        """The fields by their names."""
        everything = [
            raw for state in self.settings_sources_data.values() for raw in state["texts"].values()
        ]
        winners = self.current_state.get("texts", {})
        return dict(self.read(Layers.of(winners, everything)))
