"""Files, variables and flags -> `Settings`: each is read once, and all errors are collected."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.layers import model_sources, server_sources
from lmi_vllm.config.listen import check_listen
from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.options import ENVIRONMENT_SETTINGS, OPTIONS, SERVER_SETTINGS
from lmi_vllm.config.options.row import Option, Rows
from lmi_vllm.config.other_servers.as_settings import of_images
from lmi_vllm.config.properties import (
    PropertiesFile,
    choose_properties,
    config_properties,
    serving_properties_paths,
)
from lmi_vllm.config.resolve import Resolver, report_hidden
from lmi_vllm.config.secrets import mask_text
from lmi_vllm.config.setting import (
    FILE_PREFIX,
    CommandLine,
    Layers,
    OtherSettings,
    Report,
    Setting,
    Source,
)
from lmi_vllm.config.settings import (
    FeatureSettings,
    ModelSettings,
    ServerSettings,
    Settings,
)
from lmi_vllm.config.unknown_names import UnknownNames
from lmi_vllm.config.value_rules import resolve_address
from lmi_vllm.config.variable_names import quoted
from lmi_vllm.config.whole_variables import is_whole
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.messages import Origin, OriginKind
from lmi_vllm.sources.model_store import search_store, with_unpacked
from lmi_vllm.sources.table import Sources

# Unset they allow everything; an empty one had a value that was lost.
NEVER_EMPTY: Final = ("LMI_API_KEY", "VLLM_API_KEY", "LMI_API_KEY_FILE", "LMI_ADAPTER_ROOTS")


def load_settings(
    environ: Mapping[str, str],
    command_line: CommandLine,
    extra_properties: PropertiesFile | None,
    *,
    table: OptionTable,
    sources: Sources,
) -> Settings:
    """All configured settings with origins; errors are collected in them and never raised.

    `extra_properties` is the serving.properties of the directory that HF_MODEL_ID names, once it is
    fetched. It counts if the model store has none. A local directory's is read without it.
    """
    return _Load(environ, command_line, table, sources).settings(extra_properties)


class _Load:
    """One reading of all sources; reports are kept apart, so that they can be shown in order."""

    def __init__(
        self,
        environ: Mapping[str, str],
        command_line: CommandLine,
        table: OptionTable,
        sources: Sources,
    ) -> None:
        self.environ = environ
        self.command_line = command_line
        self.table = table
        self.sources = sources
        self.brought: dict[type[FeatureSettings], dict[str, Setting]] = {}  # options of features
        self.report = Report()
        self.passed = Report()  # messages about arguments that are passed through
        self.server_report = Report()
        self.images = OtherSettings()  # of other servers, until the file of the model is known
        self.model = Resolver(Layers({}), self.report)  # until the model's files are read

    def settings(self, extra_properties: PropertiesFile | None) -> Settings:
        """The settings; see `load_settings`."""
        config = config_properties(self.environ, self.command_line, self.report)
        server_order = server_sources(
            self.environ, self.command_line, config, self.report, self.table, self.images
        )
        file = self._choose(server_order, extra_properties)
        self.images = of_images(
            self.environ,
            self.table,
            has_model=self._has_model(file),
            flags=self.command_line.written,
        )
        for properties in (config, file):
            for sentence in properties.duplicates() if properties else ():
                self.report.warn(sentence)
        server_order = server_sources(
            self.environ, self.command_line, config, Report(), self.table, self.images
        )
        model_order = model_sources(self.environ, self.command_line, file, self.table, self.images)
        model = ModelSettings.model_validate(self._model_fields(Layers.of(model_order)))
        server = ServerSettings.model_validate(self._server_fields(Layers.of(server_order)))
        others = tuple(self._feature(kind) for kind in self.table.kinds)
        self.report.add(self.server_report)
        self.report.add(self.passed)
        self._report_others(is_strict=server.lmi_strict)
        names = UnknownNames(
            table=self.table,
            environ=self.environ,
            model=self.model.layers,
            server=self.server.layers,
            config=config,
            used=self.model.used,
            report=self.report,
            is_strict=server.lmi_strict,
        )
        unread = (*self.model.extra, *names.collect())
        self._check(model, server, others)
        return Settings(
            model, server, others, unread, self.report.warnings, self.report.errors, file
        )

    def _choose(
        self, server_order: tuple[Source, ...], extra_properties: PropertiesFile | None
    ) -> PropertiesFile | None:
        """The serving.properties that applies, which the server's own settings locate."""
        first = _Load(self.environ, self.command_line, self.table, self.sources)
        server = ServerSettings.model_validate(first._server_fields(Layers.of(server_order)))
        finding = search_store(Path(server.model_store), server.load_models)
        unpacked = with_unpacked(finding, self.environ)
        paths = serving_properties_paths(self.environ, self.command_line, unpacked, self.sources)
        return choose_properties(paths, extra_properties, self.report)

    def _model_fields(self, layers: Layers) -> Mapping[str, object]:
        """The fields of the model's settings from the winning texts."""
        self.model = Resolver(layers, self.report)
        options = self.model.options(OPTIONS)
        for kind in self.table.kinds:
            self.brought[kind] = self.model.options(Rows.of(kind.rows).options)
        passed = Resolver(layers, self.passed, self.model).pass_through()
        return {
            **_fields(OPTIONS, options | passed),
            "arguments": {name: setting.value for name, setting in passed.items()},
        }

    def _server_fields(self, layers: Layers) -> Mapping[str, object]:
        """The fields of the server's settings from the winning texts."""
        self.server = Resolver(layers, self.server_report, self.model)
        values = self.server.server_settings(SERVER_SETTINGS)
        values |= self.server.variables(ENVIRONMENT_SETTINGS)
        for name in NEVER_EMPTY:
            if name in self.environ and not self.environ[name].strip():
                self.server_report.fail(
                    f"{name} is empty, which would allow everything: give it a value, or remove "
                    "the variable"
                )
        for name in quoted(self.environ):
            self.server_report.fail(
                f"{name} has quotes around its value, which a shell takes off and `docker "
                "--env-file` does not: write it without them"
            )
        if self.command_line.strict:
            origin = Origin(OriginKind.FLAG, "--strict")
            values["LMI_STRICT"] = replace(values["LMI_STRICT"], value=True, origin=origin)
        values["inference_address"] = resolve_address(
            values["inference_address"], self.environ, self.command_line, self.server_report.fail
        )
        rows = (*SERVER_SETTINGS, *ENVIRONMENT_SETTINGS)
        return _fields(rows, values)

    def _feature(self, kind: type[FeatureSettings]) -> FeatureSettings:
        """The settings of one feature."""
        rows, resolver = Rows.of(kind.rows), self.server
        values = self.brought[kind] | resolver.server_settings(rows.server)
        values |= resolver.variables(rows.variables)
        return kind.model_validate(_fields(kind.rows, values))

    def _has_model(self, file: PropertiesFile | None) -> bool:
        """Whether something of ours names the model."""
        line = self.command_line
        named = any(raw.key == f"{FILE_PREFIX}model_id" for raw in line.vllm.values)
        variables = any(self.environ.get(name) for name in ("HF_MODEL_ID", "OPTION_MODEL_ID"))
        return bool(line.model or line.demo or named or variables or file is not None)

    def _report_others(self, *, is_strict: bool) -> None:
        """Report what flags and variables of other servers say that cannot be used here."""
        for others in (self.command_line.vllm, self.images):
            for sentence in others.errors:
                self.report.fail(sentence)
            for sentence in others.warnings:
                self.report.warn(sentence)
            for sentence in others.unknown:
                (self.report.fail if is_strict else self.report.warn)(sentence)
            for raw in others.values:
                if is_whole(raw.key) and raw.key not in self.table.variables:
                    shown = mask_text(raw.key, raw.text)
                    self.report.warn(f"{raw.origin} has no effect: set {raw.key}={shown}")

    def _check(
        self, model: ModelSettings, server: ServerSettings, others: tuple[FeatureSettings, ...]
    ) -> None:
        """Report settings that cannot be combined."""
        check_listen(server, self.report.fail)
        self._check_places(server)
        for feature in others:
            feature.check(server, self.sources, self.report.fail)
        report_hidden(self.model.layers, self.report)
        report_hidden(self.server.layers, self.report)
        if model.lora_modules and not model.enable_lora:
            modules, enabled = model.details.lora_modules, model.details.enable_lora
            self.report.fail(
                f"{modules.label} needs enable_lora=true; it is false ({enabled.origin})",
                modules,
                enabled,
            )
        if server.job_queue_size < model.max_rolling_batch_size:
            queue = server.details.job_queue_size
            batch = model.details.max_rolling_batch_size
            self.report.warn(
                f"{queue.name}={queue.value} ({queue.origin}) is below {batch.name}={batch.value} "
                f"({batch.origin}): the batch can never be full",
                queue,
                batch,
            )

    def _check_places(self, server: ServerSettings) -> None:
        """Warn of what another setting leaves without effect, or cuts."""
        line = self.command_line
        if line.demo and line.model and Path(line.model) != DEMO_MODEL_DIR:
            self.report.warn(f"--demo names no model here: {line.model_flag} {line.model} does")
        delay, whole = server.details.lmi_shutdown_delay, server.details.shutdown_timeout
        if 0 < server.shutdown_timeout <= server.lmi_shutdown_delay:
            self.report.warn(
                f"{delay.stated} leaves no time to drain: it is part of {whole.stated}",
                delay,
                whole,
            )


def _fields(rows: Sequence[Option], settings: dict[str, Setting]) -> dict[str, object]:
    """The values by field, and the settings themselves."""
    values = {row.attribute: settings[row.name].value for row in rows if row.name in settings}
    return {**values, "written": MappingProxyType(settings)}
