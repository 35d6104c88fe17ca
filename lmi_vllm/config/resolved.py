"""What configuration is once it has been read: the frozen types of the settings room."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.secrets import mask_value
from lmi_vllm.errors import ConfigurationError

DEFAULT_ORIGIN = "default"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What was typed for this start; None where a flag was not given."""

    host: str | None = None
    port: int | None = None
    model: str | None = None
    demo: bool = False
    strict: bool = False
    config_file: str | None = None
    model_store: str | None = None
    models: str | None = None


@dataclass(frozen=True, slots=True)
class RawValue:
    """A text as some source wrote it; `key` is as in the files (`option.quantize`, `engine`)."""

    key: str
    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved setting: `name` is the table's, `written` the key the user used."""

    name: str
    value: object
    origin: str
    effect: str
    target: str = ""
    note: str = ""
    written: str = ""

    @property
    def is_set(self) -> bool:
        """Whether somebody set it, rather than the default standing."""
        return self.origin != DEFAULT_ORIGIN

    @property
    def label(self) -> str:
        """How messages name it: what was written, and where."""
        return f"{self.written or self.name} ({self.origin})"

    @property
    def stated(self) -> str:
        """Name, value and place, as messages quote what somebody wrote."""
        value = str(self.shown_value).lower() if isinstance(self.value, bool) else self.shown_value
        return f"{self.written or self.name}={value} ({self.origin})"

    @property
    def shown_value(self) -> object:
        """The value as it may be printed."""
        return mask_value(self.name, self.value) if self.is_set else self.value


def _no_settings() -> Mapping[str, Setting]:
    """An empty mapping of settings."""
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything configured, each value with its origin.

    `options` are the model's options by their table name, pass-through names included; `server`
    are server and environment settings. `extra` are second names of settings already listed and
    unknown names: nothing reads them but `explain`.
    """

    options: Mapping[str, Setting] = field(default_factory=_no_settings)
    server: Mapping[str, Setting] = field(default_factory=_no_settings)
    extra: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    environment_exports: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    properties: PropertiesFile | None = None

    def option_value(self, name: str) -> object:
        """The value of option `name`; None where it has none."""
        setting = self.options.get(name)
        return None if setting is None else setting.value

    def server_value(self, name: str) -> object:
        """The value of server or environment setting `name`, or of the option of that name."""
        setting = self.server.get(name) or self.options.get(name)
        return None if setting is None else setting.value

    def is_set(self, name: str) -> bool:
        """Whether somebody set option `name`."""
        setting = self.options.get(name)
        return setting is not None and setting.is_set

    def require_valid(self) -> None:
        """Raise ConfigurationError with every error found, if there is one."""
        if self.errors:
            raise ConfigurationError(self.errors)
