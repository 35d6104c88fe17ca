"""Configuration -> `Settings`: every source, in the two orders that decide which one wins.

Each kind of origin is a pydantic-settings source that yields texts by key. Model keys take the
file over the environment, server keys the environment over the file (configuration.md section 1);
`model_sources` and `server_sources` are those orders, best first. Reading the texts is resolve.py's
work. Only local files are opened.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from lmi_vllm.config.files import (
    choose_properties,
    config_properties,
    serving_properties_paths,
)
from lmi_vllm.config.findings import Found, Layers, Report
from lmi_vllm.config.options import (
    ALIAS_VARIABLES,
    HUB_VARIABLES,
    LATE_VARIABLES,
    SAGEMAKER_VARIABLES,
    AliasVariable,
)
from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.resolve import resolve_settings
from lmi_vllm.config.resolved import CommandLine, RawValue, Setting, Settings
from lmi_vllm.config.variable_names import (
    FILE_PREFIX,
    OPTION_PREFIX,
    SERVING_PREFIX,
    is_kubernetes_made,
    option_key,
)
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.sources.model_store import DEFAULT_STORE, search_store, with_unpacked

__all__ = ["CommandLine", "Setting", "Settings", "load_settings"]


class MergedKeys(BaseSettings):
    """One level's keys; the first source that has a key wins."""

    values: dict[str, Any] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources handed to the constructor, in their order, and no others."""
        sources: tuple[PydanticBaseSettingsSource, ...] = init_settings.init_kwargs[  # type: ignore[attr-defined]
            "sources"
        ]
        return sources


class RawSource(PydanticBaseSettingsSource):
    """One kind of origin: what it sets, as text."""

    def __init__(self) -> None:
        super().__init__(MergedKeys)

    def raw_values(self) -> Iterator[RawValue]:
        """Everything this origin sets."""
        raise NotImplementedError

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Unused: `__call__` hands over all keys at once."""
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        """The keys as pydantic-settings merges them."""
        return {"values": {raw.key: raw for raw in self.raw_values()}}


class EnvironmentSource(RawSource):
    """Base of the sources that read variables."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        self.environ = environ

    def variable(self, name: str, *keys: str) -> Iterator[RawValue]:
        """Variable `name` under each of `keys`, unless it is unset or empty."""
        if self.environ.get(name):
            for key in keys:
                yield RawValue(key, self.environ[name], name)


class ModelFlags(RawSource):
    """`--model` and `--demo`, as far as they choose the model."""

    def __init__(self, command_line: CommandLine) -> None:
        super().__init__()
        self.command_line = command_line

    def raw_values(self) -> Iterator[RawValue]:
        """The model id that was typed."""
        if self.command_line.model:
            yield RawValue(f"{FILE_PREFIX}model_id", self.command_line.model, "--model")
        elif self.command_line.demo:
            yield RawValue(f"{FILE_PREFIX}model_id", str(DEMO_MODEL_DIR), "--demo")


class SageMakerVariables(EnvironmentSource):
    """The platform's variables that override serving.properties."""

    def raw_values(self) -> Iterator[RawValue]:
        """Worker counts and time limits."""
        for name, keys in SAGEMAKER_VARIABLES:
            yield from self.variable(name, *keys)


class ServingProperties(RawSource):
    """The one serving.properties that applies."""

    def __init__(self, file: PropertiesFile | None) -> None:
        super().__init__()
        self.file = file

    def raw_values(self) -> Iterator[RawValue]:
        """Its keys, each with file and line."""
        if self.file is not None:
            for key, entry in self.file.by_key().items():
                yield RawValue(key, entry.value, self.file.origin(entry))


class HubVariables(EnvironmentSource):
    """`HF_MODEL_ID`, `HF_REVISION`, `HF_TASK`."""

    def raw_values(self) -> Iterator[RawValue]:
        """Model id, revision and task."""
        for name, key in HUB_VARIABLES:
            yield from self.variable(name, key)


class OptionVariables(EnvironmentSource):
    """`OPTION_*`."""

    def raw_values(self) -> Iterator[RawValue]:
        """Every option variable that is not empty and not Kubernetes'."""
        for name, text in self.environ.items():
            if name.startswith(OPTION_PREFIX) and not is_kubernetes_made(name, text):
                yield from self.variable(name, option_key(name))


class OptionAliases(EnvironmentSource):
    """The older names of table 2.2 that stand for an `OPTION_*` variable."""

    def raw_values(self) -> Iterator[RawValue]:
        """Each alias whose target is unset or empty."""
        for alias in ALIAS_VARIABLES:
            if alias.target.startswith(OPTION_PREFIX) and not self.environ.get(alias.target):
                yield from self._copied(alias)

    def _copied(self, alias: AliasVariable) -> Iterator[RawValue]:
        """The alias under its target's key."""
        for raw in self.variable(alias.source, option_key(alias.target)):
            if alias.source == "ENABLE_CUDA_GRAPHS":
                inverted = "false" if raw.text == "true" else "true"
                yield replace(raw, text=inverted)
            else:
                yield raw


class LateVariables(EnvironmentSource):
    """Variables that are consulted only while their option is unset."""

    def raw_values(self) -> Iterator[RawValue]:
        """Each of them, or the alias that stands for it."""
        for name, option in LATE_VARIABLES:
            key = f"{FILE_PREFIX}{option}"
            if self.environ.get(name):
                yield from self.variable(name, key)
                continue
            for alias in ALIAS_VARIABLES:
                if alias.target == name:
                    yield from self.variable(alias.source, key)


class ServerFlags(RawSource):
    """`--demo`: its directory is the store, whatever else is configured."""

    def __init__(self, command_line: CommandLine) -> None:
        super().__init__()
        self.command_line = command_line

    def raw_values(self) -> Iterator[RawValue]:
        """The embedded model's directory as the store."""
        if self.command_line.demo:
            yield RawValue("model_store", str(DEMO_MODEL_DIR), "--demo")
            yield RawValue("load_models", "ALL", "--demo")


class RequestSizeVariables(EnvironmentSource):
    """SageMaker's two limits for the request body; they override everything."""

    def __init__(self, environ: Mapping[str, str], report: Report) -> None:
        super().__init__(environ)
        self.report = report

    def raw_values(self) -> Iterator[RawValue]:
        """The limit in bytes."""
        size = self.environ.get("SAGEMAKER_MAX_REQUEST_SIZE", "")
        payload = self.environ.get("SAGEMAKER_MAX_PAYLOAD_IN_MB", "")
        if size and payload:
            self.report.warn(
                "SAGEMAKER_MAX_PAYLOAD_IN_MB is ignored: SAGEMAKER_MAX_REQUEST_SIZE is set too"
            )
        name, text, unit = ("SAGEMAKER_MAX_REQUEST_SIZE", size, 1)
        if payload and not size:
            name, text, unit = ("SAGEMAKER_MAX_PAYLOAD_IN_MB", payload, 1 << 20)
        if not text:
            return
        digits = text.strip()
        if digits.isascii() and digits.isdigit() and 0 < len(digits) < 16 and int(digits):  # noqa: PLR2004
            yield RawValue("max_request_size", str(int(digits) * unit), name)
        else:
            self.report.warn(f"{name} is ignored: {text!r} is not a whole number above 0")


class ServingVariables(EnvironmentSource):
    """`SERVING_*`, and the alias that stands for one."""

    def raw_values(self) -> Iterator[RawValue]:
        """Every server variable that is not empty and not Kubernetes'."""
        for name, text in self.environ.items():
            if name.startswith(SERVING_PREFIX) and not is_kubernetes_made(name, text):
                yield from self.variable(name, name.removeprefix(SERVING_PREFIX).lower())
        for alias in ALIAS_VARIABLES:
            if alias.target.startswith(SERVING_PREFIX) and not self.environ.get(alias.target):
                key = alias.target.removeprefix(SERVING_PREFIX).lower()
                yield from self.variable(alias.source, key)


class UpstreamFlags(RawSource):
    """LMI's own flags `-m` and `-s`."""

    def __init__(self, command_line: CommandLine) -> None:
        super().__init__()
        self.command_line = command_line

    def raw_values(self) -> Iterator[RawValue]:
        """Store and model list."""
        if self.command_line.model_store:
            yield RawValue("model_store", self.command_line.model_store, "--model-store")
        if self.command_line.models:
            yield RawValue("load_models", self.command_line.models, "--models")


class ConfigProperties(ServingProperties):
    """config.properties."""


def model_sources(
    environ: Mapping[str, str], command_line: CommandLine, file: PropertiesFile | None
) -> tuple[RawSource, ...]:
    """The order for model keys, best first: the file wins over the environment."""
    without_hub = {} if command_line.demo else environ
    return (
        ModelFlags(command_line),
        SageMakerVariables(environ),
        ServingProperties(file),
        HubVariables(without_hub),  # the embedded model has no revision on the hub
        OptionVariables(environ),
        OptionAliases(environ),
        LateVariables(environ),
    )


def server_sources(
    environ: Mapping[str, str],
    command_line: CommandLine,
    file: PropertiesFile | None,
    report: Report,
) -> tuple[RawSource, ...]:
    """The order for server keys, best first: the environment wins over the file."""
    return (
        ServerFlags(command_line),
        RequestSizeVariables(environ, report),
        ServingVariables(environ),
        UpstreamFlags(command_line),
        ConfigProperties(file),
    )


def _merge(sources: tuple[RawSource, ...]) -> Layers:
    """The winners among `sources`, and everything they hide."""
    winners = MergedKeys(sources=sources).values  # type: ignore[call-arg]
    everything = [raw for source in sources for raw in source()["values"].values()]
    hidden = tuple(raw for raw in everything if winners[raw.key] != raw)
    return Layers(winners, hidden)


def load_settings(
    environ: Mapping[str, str],
    command_line: CommandLine = CommandLine(),  # noqa: B008 - frozen, so one default is safe
    extra_properties: PropertiesFile | None = None,
) -> Settings:
    """Everything configured, with origins; errors are collected in it and never raised.

    `extra_properties` is the serving.properties of the directory that HF_MODEL_ID names, once
    fetched; it counts where the model store has none. A local directory's is read without it.
    """
    report = Report()
    config = config_properties(environ, command_line, report)
    server = _merge(server_sources(environ, command_line, config, report))
    store, chosen = server.winners.get("model_store"), server.winners.get("load_models")
    folder = Path(store.text if store else DEFAULT_STORE)
    finding = with_unpacked(search_store(folder, chosen.text if chosen else "ALL"), environ)
    paths = serving_properties_paths(environ, command_line, finding)
    file = choose_properties(paths, extra_properties, report)
    model = _merge(model_sources(environ, command_line, file))
    for properties in (config, file):
        for sentence in properties.duplicates() if properties else ():
            report.warn(sentence)
    return resolve_settings(Found(environ, command_line, model, server, file, config), report)
