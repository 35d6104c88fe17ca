"""The sources of settings, and the two orders that decide which one wins.

Each kind of origin is a pydantic-settings source that yields texts by key. Model keys take the
file over the environment, server keys the environment over the file; `model_sources` and
`server_sources` are those orders, best first. What the texts mean is resolve.py's work, which
comes in as the last source.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from lmi_vllm.config.options import (
    ALIAS_VARIABLES,
    CONFIG,
    HUB_VARIABLES,
    LATE_VARIABLES,
    SAGEMAKER_VARIABLES,
    AliasVariable,
    all_rows,
)
from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.setting import FILE_PREFIX, CommandLine, Layers, RawValue, Report
from lmi_vllm.config.variable_names import (
    OPTION_PREFIX,
    SERVING_PREFIX,
    is_kubernetes_made,
    option_key,
)
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.origin import Origin, OriginKind


class RawSource(PydanticBaseSettingsSource):
    """One kind of origin: what it sets, as text."""

    def __init__(self) -> None:
        super().__init__(BaseSettings)

    def raw_values(self) -> Iterator[RawValue]:
        """Everything this origin sets."""
        raise NotImplementedError

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Unused: `__call__` hands over all keys at once."""
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        """The keys as pydantic-settings merges them."""
        return {"texts": {raw.key: raw for raw in self.raw_values()}}


class Reading(RawSource):
    """The last source: makes the fields out of the texts that the sources before it left."""

    def __init__(self, read: Callable[[Layers], Mapping[str, object]]) -> None:
        super().__init__()
        self.read = read

    def __call__(self) -> dict[str, Any]:
        """The fields by their names."""
        everything = [
            raw for state in self.settings_sources_data.values() for raw in state["texts"].values()
        ]
        winners = self.current_state.get("texts", {})
        return dict(self.read(Layers.of(winners, everything)))


class EnvironmentSource(RawSource):
    """Base of the sources that read variables."""

    kind = OriginKind.VARIABLE

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        self.environ = environ

    def variable(self, name: str, *keys: str, kind: OriginKind | None = None) -> Iterator[RawValue]:
        """Variable `name` under each of `keys`, unless it is unset or empty."""
        if self.environ.get(name):
            for key in keys:
                yield RawValue(key, self.environ[name], Origin(kind or self.kind, name))


class ModelFlags(RawSource):
    """`--model` and `--demo`, as far as they choose the model."""

    def __init__(self, command_line: CommandLine) -> None:
        super().__init__()
        self.command_line = command_line

    def raw_values(self) -> Iterator[RawValue]:
        """The model id that was typed."""
        if self.command_line.model:
            yield RawValue(f"{FILE_PREFIX}model_id", self.command_line.model, _flag("--model"))
        elif self.command_line.demo:
            yield RawValue(f"{FILE_PREFIX}model_id", str(DEMO_MODEL_DIR), _flag("--demo"))


class SageMakerVariables(EnvironmentSource):
    """The platform's variables that override serving.properties."""

    kind = OriginKind.PLATFORM

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

    kind = OriginKind.HUB

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
    """The older names that stand for an `OPTION_*` variable."""

    kind = OriginKind.ALIAS

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

    kind = OriginKind.LATE

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
            yield RawValue("model_store", str(DEMO_MODEL_DIR), _flag("--demo"))
            yield RawValue("load_models", "ALL", _flag("--demo"))


class RequestSizeVariables(EnvironmentSource):
    """SageMaker's two limits for the request body; they override everything."""

    kind = OriginKind.PLATFORM

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
            yield RawValue("max_request_size", str(int(digits) * unit), Origin(self.kind, name))
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
                yield from self.variable(alias.source, key, kind=OriginKind.ALIAS)


class UpstreamFlags(RawSource):
    """LMI's own flags `-m` and `-s`."""

    def __init__(self, command_line: CommandLine) -> None:
        super().__init__()
        self.command_line = command_line

    def raw_values(self) -> Iterator[RawValue]:
        """Store and model list."""
        if self.command_line.model_store:
            yield RawValue("model_store", self.command_line.model_store, _flag("--model-store"))
        if self.command_line.models:
            yield RawValue("load_models", self.command_line.models, _flag("--models"))


class ConfigProperties(ServingProperties):
    """config.properties, as far as its keys count there."""

    def raw_values(self) -> Iterator[RawValue]:
        """Its keys, but for those that are read elsewhere only."""
        counts = {row.name for row in all_rows().server if CONFIG in row.written}
        return (raw for raw in super().raw_values() if raw.key in counts)


def _flag(name: str) -> Origin:
    return Origin(OriginKind.FLAG, name)


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
