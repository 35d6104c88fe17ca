"""The configuration as it is read everywhere: `Settings`, typed and frozen.

`ModelSettings` and `ServerSettings` are the option table's own classes (options/). load.py fills
them from the sources of layers.py in their two orders. Attributes have the
types of the table; where a value was written, and how messages name it, is in `details`.

A feature brings settings of its own as a class over `FeatureSettings`, which its `configure` adds.
Its fields are whole environment variables. With a `section` of the class they are options and
server settings like the core's. `check` may refuse what does not go together.
`Settings.feature(TheClass)` is the typed instance:

    class CacheSettings(FeatureSettings):
        lmi_cache_uri: str | None = variable(parse.any_text, "Folder or URL ...")

    settings.feature(CacheSettings).lmi_cache_uri
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

from pydantic import Field, SkipValidation

from lmi_vllm.config.options import ModelOptions, ServerOptions
from lmi_vllm.config.options.row import ENVIRONMENT, Section
from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.setting import Details, Setting
from lmi_vllm.sources.table import Sources

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class LayeredSettings(Section):
    """Settings that were written in several places."""

    written: SkipValidation[Mapping[str, Setting]] = Field(default_factory=lambda: _NOTHING)

    @cached_property
    def details(self) -> Details[Self]:
        """Where each setting was written; `written` has those with a value, by users' names."""
        return Details(self.written, self.rows)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """These settings themselves: they are frozen, and their mappings are read-only."""
        return self


class ModelSettings(ModelOptions, LayeredSettings):
    """The model's options. `arguments` are other arguments of vLLM, by name."""

    arguments: SkipValidation[Mapping[str, object]] = Field(default_factory=lambda: _NOTHING)


class ServerSettings(ServerOptions, LayeredSettings):
    """The settings of the server, and its environment variables."""

    @property
    def adapter_roots(self) -> tuple[Path, ...]:
        """The folders that local adapters must lie below; none allows all."""
        return tuple(map(Path, filter(None, (self.lmi_adapter_roots or "").split(os.pathsep))))

    @property
    def hides_failure(self) -> bool:
        """Whether `/ping` is 200 even after the engine has failed for good."""
        return self.health_check_override or bool(self.sagemaker_health_check_override)


class FeatureSettings(LayeredSettings):
    """Base of a feature's settings: environment variables, unless `section` has others."""

    section: ClassVar[str] = ENVIRONMENT

    def check(self, server: ServerSettings, sources: Sources, fail: Callable[[str], None]) -> None:
        """Report conflicts with the server's settings; the base class reports none."""

    def forbidden_in_secure_mode(self) -> Iterator[str]:
        """Yield what secure mode refuses of these settings; the base class refuses nothing."""
        yield from ()


Feature = TypeVar("Feature", bound=FeatureSettings)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything configured, each value with its origin.

    `others` are second names of listed settings, and unknown names. Only `explain` reads them.
    `properties` is the serving.properties that applies.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    features: tuple[FeatureSettings, ...] = ()
    others: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    properties: PropertiesFile | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """These settings themselves, which cannot change."""
        return self

    def feature(self, kind: type[Feature]) -> Feature:
        """The settings of that feature; its defaults if they were not read."""
        instance = next((found for found in self.features if isinstance(found, kind)), None)
        return kind() if instance is None else instance

    @property
    def environment_exports(self) -> Mapping[str, str]:
        """The variables that `option.env` asks for, and the hub's token if it is an argument.

        vLLM reads its argument `hf_token` for config.json only; fetches read the variable.
        """
        token = self.model.arguments.get("hf_token")
        if not isinstance(token, str):
            return self.model.env or _NOTHING
        return {**(self.model.env or _NOTHING), "HF_TOKEN": token}

    def server_details(self) -> Iterator[Setting]:
        """Every setting of the server and of the features that has a value."""
        yield from self.server.details.values()
        for feature in self.features:
            yield from feature.details.values()

    def all_details(self) -> Iterator[Setting]:
        """Every setting that has a value: the model's, then the server's."""
        yield from self.model.details.values()
        yield from self.server_details()
