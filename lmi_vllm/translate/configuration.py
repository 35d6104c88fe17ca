"""How a server reads its configuration and what that means; features add to it in `configure`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from lmi_vllm.checks.model import OwnEngine, OwnEngines
from lmi_vllm.checks.model_config import read_model_files
from lmi_vllm.config.listen import MakeTls
from lmi_vllm.config.load import load_settings
from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import FeatureSettings, Settings
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.slot import Slot
from lmi_vllm.sources.base import Repositories, Store
from lmi_vllm.sources.table import Sources
from lmi_vllm.translate.arguments import ModelReader, Translation, Translator
from lmi_vllm.translate.draft import Rule, RulePhase
from lmi_vllm.translate.explain import ExplainedDefaults, Explanation, explain

# Warnings of users' code, without running it; a StartupError where it cannot be loaded.
CheckCode = Callable[[Settings, ModelArtifacts], tuple[str, ...]]


class SecurityChecks(Protocol):
    """Secure mode: lists every violation instead of raising; none if it is off."""

    def start_violations(
        self, settings: Settings, environ: Mapping[str, str], directory: Path | None
    ) -> tuple[str, ...]:
        """The violations of a start; `directory` is the model's, if there is one."""
        ...

    def adapter_violations(self, settings: Settings, folder: Path) -> tuple[str, ...]:
        """The violations in the folder of one adapter."""
        ...


# Errors of a local model's files, which a start finds before the engine, too.
CheckFiles = Callable[[Settings, ModelArtifacts], tuple[str, ...]]
MakeSecurity = Callable[[OptionTable], SecurityChecks]


@dataclass(frozen=True, slots=True)
class Configuration:
    """Reads settings and says what they mean.

    `model_classes` are registered with vLLM: name in `architectures` -> `module:Class`.
    """

    sources: Sources
    options: OptionTable
    translator: Translator
    security: SecurityChecks
    make_tls: MakeTls
    check_code: CheckCode
    file_checks: tuple[CheckFiles, ...]
    defaults: ExplainedDefaults
    model_classes: Mapping[str, str]

    def load(
        self,
        environ: Mapping[str, str],
        command_line: CommandLine = CommandLine(),  # noqa: B008 - frozen, so one default is safe
        extra_properties: PropertiesFile | None = None,
    ) -> Settings:
        """All configured settings; see `load_settings`."""
        table, sources = self.options, self.sources
        return load_settings(environ, command_line, extra_properties, table=table, sources=sources)

    def explain(self, translation: Translation) -> Explanation:
        """The explanation of a translation, without secrets."""
        return explain(translation, self.defaults)

    def reader(self, environ: Mapping[str, str], *, with_size: bool = False) -> ModelReader:
        """Reads config.json of a model (and the weights' size), over the network too."""
        return lambda model: read_model_files(model, environ, self.sources, with_size=with_size)


class ConfigurationBuilder:
    """What features add, each after those before it; `settings` in the order of the pages.

    `stores` are for one URL scheme each, `hub` for ids that are neither paths nor URLs. `engines`
    are for models that vLLM does not run. `files` check a local model for `explain`, `validate`.
    """

    def __init__(self) -> None:
        self.settings: list[type[FeatureSettings]] = []
        self.rules: dict[RulePhase, list[Rule]] = {phase: [] for phase in RulePhase}
        self.stores: list[Store] = []
        self.hub = Slot[Repositories]("hub")
        self.engines: list[OwnEngine] = []
        self.model_classes: dict[str, str] = {}
        self.security = Slot[MakeSecurity]("secure mode")
        self.tls = Slot[MakeTls]("TLS")
        self.code = Slot[CheckCode]("users' code")
        self.files: list[CheckFiles] = []
        self.defaults = Slot[ExplainedDefaults]("defaults that are explained")

    def build(self) -> Configuration:
        """The configuration with everything that was added."""
        options, sources = OptionTable(self.settings), Sources(self.stores, self.hub.value)
        engines = OwnEngines(tuple(self.engines))
        return Configuration(
            sources,
            options,
            Translator(options, sources, engines, self.rules),
            self.security.value(options),
            self.tls.value,
            self.code.value,
            tuple(self.files),
            self.defaults.value,
            MappingProxyType(self.model_classes),
        )
