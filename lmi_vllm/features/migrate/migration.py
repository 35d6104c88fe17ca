"""Converts an existing configuration, and reports what was mapped, approximated and refused."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.options import ENVIRONMENT_SETTINGS
from lmi_vllm.config.options.row import ENV, FILE, EffectWord, Option
from lmi_vllm.config.other_servers.replacement import Replacement, variable
from lmi_vllm.config.other_servers.tgi_variables import (
    TGI_ONLY_NAMES,
    TGI_VARIABLES,
    pair_replacements,
)
from lmi_vllm.config.other_servers.vllm_flags import Flag, read_flags, read_variables
from lmi_vllm.config.other_servers.vllm_server import replacement_of, vllm_address
from lmi_vllm.config.properties import PropertiesFile, parse_properties
from lmi_vllm.config.secrets import is_secret, mask_text
from lmi_vllm.config.setting import FILE_PREFIX, Sentence, Setting
from lmi_vllm.config.value_rules import EMBEDDING_ENGINES
from lmi_vllm.config.variable_names import OPTION_PREFIX, SERVING_PREFIX
from lmi_vllm.messages import OriginKind
from lmi_vllm.translate.arguments import Translation
from lmi_vllm.translate.configuration import Configuration
from lmi_vllm.translate.devices import Devices

_ENOUGH_GPUS: Final = 1024  # the target machine is unknown: no check may fail for lack of GPUs
_NO_STORE: Final = MappingProxyType({"SERVING_MODEL_STORE": "/nonexistent"})


_DEFAULT: Final = "(default)"  # the source of a step about what is not set


class SourceServer(StrEnum):
    """The server that a configuration was written for, as `--from` names it."""

    LMI = "lmi"
    TGI = "tgi"
    VLLM = "vllm"
    SAGEMAKER_VLLM = "sm-vllm"


class StepOutcome(StrEnum):
    """What became of one setting; the words of the report."""

    MAPPED = "mapped"
    APPROXIMATED = "approximated"
    REFUSED = "refused"
    DEFAULT = "changed defaults"


@dataclass(frozen=True, slots=True)
class Step:
    """One setting of the source and its outcome, for the report."""

    outcome: StepOutcome
    source: str
    becomes: str = ""
    why: str = ""


@dataclass(slots=True)
class Migration:
    """The configuration being written, and the report."""

    server: SourceServer
    configuration: Configuration
    properties: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def add(self, source: str, replacement: Replacement) -> None:
        """Write the replacement of one setting, and report it."""
        if replacement.is_refused:
            self.steps.append(Step(StepOutcome.REFUSED, source, why=replacement.why))
            return
        becomes = "nothing to set"
        if replacement.key is not None:
            becomes = self._write(replacement.key, replacement.text, replacement.kind)
        is_same = replacement.key is not None and not replacement.why
        outcome = StepOutcome.MAPPED if is_same else StepOutcome.APPROXIMATED
        self.steps.append(Step(outcome, source, becomes, replacement.why))

    def _write(self, key: str, text: str, kind: OriginKind) -> str:
        """Set `key`; a value with a secret is never copied, the report has its new name alone."""
        shown = mask_text(key.removeprefix(FILE_PREFIX), text)
        if shown != text:
            return f"{key} (set it to the same value)"
        (self.environment if kind is OriginKind.VARIABLE else self.properties)[key] = text
        return f"{key}={shown}"

    def default(self, key: str, text: str, why: str) -> None:
        """Set `key` where the source leaves it to a default that differs from ours."""
        if key not in self.properties:
            self.properties[key] = text
            self.steps.append(Step(StepOutcome.MAPPED, _DEFAULT, f"{key}={text}", why))

    def server_row(self, name: str) -> Option | None:
        """Return the row of that server setting; None for other names."""
        rows = self.configuration.options.rows.server
        return next((row for row in rows if row.name == name), None)

    def read(self, environ: Mapping[str, str], file: PropertiesFile | None) -> Translation:
        """Return the meaning of a configuration, on a machine with enough GPUs and no store."""
        settings = self.configuration.load({**environ, **_NO_STORE}, extra_properties=file)
        translate = self.configuration.translator.translate
        return translate(settings, None, Devices(_ENOUGH_GPUS))

    @property
    def shown_steps(self) -> list[Step]:
        """The steps without the secrets of URLs and JSON that a reason quotes."""
        return [
            Step(
                step.outcome,
                *(mask_text("", part) for part in (step.source, step.becomes, step.why)),
            )
            for step in self.steps
        ]

    @property
    def has_read(self) -> bool:
        """Whether there was anything to migrate."""
        return any(step.source != _DEFAULT for step in self.steps)

    @property
    def is_complete(self) -> bool:
        """Whether nothing was refused."""
        return all(step.outcome is not StepOutcome.REFUSED for step in self.steps)


def detect_server(
    environ: Mapping[str, str], file: PropertiesFile | None, flags: bool
) -> SourceServer:
    """Return the server that the configuration is for."""
    if flags:
        return SourceServer.VLLM
    if any(name.startswith("SM_VLLM_") for name in environ):
        return SourceServer.SAGEMAKER_VLLM
    if file is not None or any(name.startswith(OPTION_PREFIX) for name in environ):
        return SourceServer.LMI
    is_tgi = any(name in environ for name in TGI_ONLY_NAMES)
    return SourceServer.TGI if is_tgi else SourceServer.LMI


def migrate_tgi(environ: Mapping[str, str], configuration: Configuration) -> Migration:
    """Return the migration of a TGI environment."""
    migration = Migration(SourceServer.TGI, configuration)
    for name, text in environ.items():
        convert = TGI_VARIABLES.get(name)
        if convert is None or not text:
            continue
        source = f"{name}={mask_text(name, text)}"
        try:
            migration.add(source, convert(text))
        except ValueError as error:
            why = f"{text!r} cannot be read: {error}"
            migration.add(source, Replacement(None, why=why, is_refused=True))
    _name_secrets(migration, environ)
    for source, replacement in pair_replacements(environ):
        migration.add(source, replacement)
    _enable_lora(migration)
    migration.default("option.tgi_compat", "true", "replies keep TGI's schema")
    migration.default("job_queue_size", "128", "TGI's max_concurrent_requests")
    return checked(migration)


def migrate_vllm(flags: Sequence[str], configuration: Configuration) -> Migration:
    """Return the migration of the flags of `vllm serve`."""
    return _from_flags(Migration(SourceServer.VLLM, configuration), read_flags(flags))


def migrate_sagemaker_vllm(environ: Mapping[str, str], configuration: Configuration) -> Migration:
    """Return the migration of `SM_VLLM_*` variables."""
    migration = Migration(SourceServer.SAGEMAKER_VLLM, configuration)
    _name_secrets(migration, environ)
    return _from_flags(migration, read_variables(environ))


_ONE_OF_EACH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tensor_parallel_size": "vLLM uses one GPU; ours all of them",
        "data_parallel_size": "vLLM makes no copies by itself",
    }
)


def _from_flags(migration: Migration, flags: Sequence[Flag]) -> Migration:
    """Add every flag, and vLLM's defaults where ours differ; return the checked migration."""
    for flag in flags:
        replacement = replacement_of(flag, flags, migration.configuration.options)
        migration.add(flag.source, replacement)
    properties = migration.properties
    address = vllm_address(flags)
    if address.startswith("https") and "SERVING_INFERENCE_ADDRESS" not in migration.environment:
        migration.add(_DEFAULT, variable("SERVING_INFERENCE_ADDRESS", address))
    if "option.model_id" in properties:
        model = properties["option.model_id"]
        migration.default("option.served_model_name", model, "vllm serve answers to the model id")
    refused = {flag.name for flag in flags if flag.problem}
    for name, why in _ONE_OF_EACH.items():
        if name not in refused:  # a value is missing there: no default fits it
            migration.default(f"{FILE_PREFIX}{name}", "1", why)
    _enable_lora(migration)
    if properties.get("option.enable_lora") == "true":
        migration.default("option.max_loras", "1", "vLLM's default")
    if "option.max_num_seqs" not in properties:
        why = "vLLM's max_num_seqs depends on the hardware; set it to keep what you had"
        becomes = "option.max_rolling_batch_size=256"
        migration.steps.append(Step(StepOutcome.APPROXIMATED, _DEFAULT, becomes, why))
    return checked(migration)


def _enable_lora(migration: Migration) -> None:
    if "option.lora_modules" in migration.properties:
        migration.default("option.enable_lora", "true", "adapters of the start need it")


def migrate_lmi(
    environ: Mapping[str, str], file: PropertiesFile | None, configuration: Configuration
) -> Migration:
    """Return the migration of an LMI configuration of any backend."""
    migration = Migration(SourceServer.LMI, configuration)
    without_secrets = {name: text for name, text in environ.items() if not is_secret(name)}
    translation = migration.read(without_secrets, file)
    settings, variables = translation.settings, configuration.options.rows.variables
    whole = {row.name for row in variables}
    warnings = (*settings.warnings, *translation.warnings)
    unnamed = [*settings.errors, *translation.errors]
    arguments = translation.arguments
    entries = file.entries if file is not None else ()
    texts = {file.origin(entry): entry.value for entry in entries if file}
    for setting in settings.all_details():
        is_ours = setting is settings.server.details.model_store  # _NO_STORE
        if not setting.is_set or is_ours or setting.name in whole:
            continue
        if setting.name == "inference_address" and environ.get("SAGEMAKER_BIND_TO_PORT"):
            continue  # SageMaker sets that itself: the variable is kept, and means the same
        source = _as_written(setting, texts.get(setting.origin, environ.get(setting.origin.name)))
        faults = _about(setting, (*settings.errors, *translation.errors))
        if faults:  # `serve` would refuse it, so it is not written
            migration.steps.append(Step(StepOutcome.REFUSED, source, why="; ".join(faults)))
            unnamed = [text for text in unnamed if text not in faults]
        else:
            is_used = any(arguments.origin_of(name) == setting.origin for name in setting.targets)
            why = "; ".join(_about(setting, warnings))
            migration.add(source, _replacement_of_setting(migration, setting, why, is_used=is_used))
    _name_secrets(migration, environ)
    for error in unnamed:
        migration.steps.append(Step(StepOutcome.REFUSED, "(check)", why=error))
    for setting in settings.others:
        if setting.effect == EffectWord.UNKNOWN:
            migration.steps.append(Step(StepOutcome.REFUSED, setting.label, why=setting.note))
    return migration


def report_defaults(
    migration: Migration, environ: Mapping[str, str], file: PropertiesFile | None
) -> None:
    """Report each default that is another than in LMI's guides, as `explain` does."""
    if migration.server is not SourceServer.LMI:
        return
    settings, defaults = migration.read(environ, file).settings, migration.configuration.defaults
    for setting in (*settings.all_details(), *defaults.rows(settings)):
        if not setting.is_set and (why := defaults.note(setting)):
            becomes = f"{setting.name}={setting.shown_value}"
            migration.steps.append(Step(StepOutcome.DEFAULT, _DEFAULT, becomes, why))


def _about(setting: Setting, sentences: Sequence[str]) -> list[str]:
    """Return those of the sentences that are about the setting."""
    place = (setting.name, setting.origin)
    return [one for one in sentences if isinstance(one, Sentence) and place in one.about]


def _name_secrets(migration: Migration, environ: Mapping[str, str]) -> None:
    """Report each secret that is read as one to set again: none is copied."""
    known = {row.name for row in ENVIRONMENT_SETTINGS}
    for name, text in environ.items():
        is_read = name in known or name.startswith(OPTION_PREFIX)
        if text and is_read and is_secret(name):
            migration.add(f"{name}={mask_text(name, text)}", variable(name, text))


def _as_written(setting: Setting, text: str | None) -> str:
    """Return name, unparsed text and origin of a setting, secrets masked."""
    if text is None:
        return setting.stated
    name = setting.written or setting.name
    return f"{name}={mask_text(setting.name, text)} ({setting.origin})"


def _replacement_of_setting(
    migration: Migration, setting: Setting, why: str, *, is_used: bool
) -> Replacement:
    """Return what one LMI setting becomes; its warnings are why that is an approximation."""
    row = migration.configuration.options.find(setting.name)
    key = setting.written or setting.name
    if setting.name == "engine" and setting.value in EMBEDDING_ENGINES:
        return Replacement("engine", str(setting.value), why)  # what is embedded depends on it
    if setting.effect in (EffectWord.WARNS, EffectWord.NONE):
        return Replacement(None, why=why or setting.note or "it has no effect here")
    if setting.effect == EffectWord.REFUSES:
        return Replacement(None, why="reported below" if setting.value else "it was off")
    if setting.value is None:  # such as the name of the built-in handler
        return Replacement(None, why=why or "it is the default here")
    if row is not None and row.effect.is_fallback and is_used:
        key = f"{FILE_PREFIX}{setting.targets[0]}"
    server = migration.server_row(setting.name)
    if server is not None and FILE not in server.written:
        return variable(f"{SERVING_PREFIX}{setting.name.upper()}", as_text(setting), why)
    return Replacement(key, as_text(setting), why)


def as_text(setting: Setting) -> str:
    """Return the setting's value as it is written in a properties file."""
    value = setting.value
    if value is None:
        return "None"
    if setting.name == "env" and isinstance(value, dict):  # the only pairs that are no JSON
        return ",".join(f"{name}={text}" for name, text in value.items())
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def checked(migration: Migration) -> Migration:
    """Return the migration with the errors added that reading its result back gives."""
    file = parse_properties(as_properties(migration.properties), "the result")
    translation = migration.read(migration.environment, file)
    for error in (*translation.settings.errors, *translation.errors):
        migration.steps.append(Step(StepOutcome.REFUSED, "(check)", why=error))
    return migration


def as_properties(properties: Mapping[str, str]) -> str:
    """Return the properties file, which reads back the same."""
    return "".join(
        f"{_escape(key, ' =:#!')}={_escape(text, '')}\n" for key, text in properties.items()
    )


def as_variables(migration: Migration) -> tuple[dict[str, str], dict[str, str]]:
    """Return the result as variables, and the keys without a variable, which need the file."""
    variables, rest = dict(migration.environment), {}
    for key, text in migration.properties.items():
        row = migration.server_row(key)
        if key.startswith(FILE_PREFIX):
            variables[OPTION_PREFIX + key.removeprefix(FILE_PREFIX).upper()] = text
        elif row is not None and ENV in row.written:
            variables[SERVING_PREFIX + key.upper()] = text
        else:
            rest[key] = text
    return variables, rest


def _escape(text: str, also: str) -> str:
    """Return `text` with the characters escaped that properties files read specially."""
    escaped = re.sub(rf"([\\{re.escape(also)}])", r"\\\1", text)
    escaped = escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return f"\\{escaped}" if escaped[:1] == " " else escaped
