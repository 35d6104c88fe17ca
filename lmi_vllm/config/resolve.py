"""Merged texts -> `Settings`: parse, settle double names, and say what has no effect."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.findings import Found, Layers, Report, shown
from lmi_vllm.config.front_end_rules import check_front_ends
from lmi_vllm.config.listen import check_listen
from lmi_vllm.config.options import (
    ENVIRONMENT_SETTINGS,
    FILE,
    LATE_VARIABLES,
    OPTIONS,
    SERVER_SETTINGS,
    EffectWord,
    Option,
)
from lmi_vllm.config.parsers import Parser, as_vllm, boolean
from lmi_vllm.config.resolved import DEFAULT_ORIGIN, CommandLine, RawValue, Setting, Settings
from lmi_vllm.config.secrets import mask_text
from lmi_vllm.config.unknown_names import UnknownNames
from lmi_vllm.config.value_rules import VALUE_RULES, settle_address
from lmi_vllm.config.variable_names import FILE_PREFIX
from lmi_vllm.config.vllm_schema import coerce, load_release

_LATE_ORIGINS: Final = frozenset({name for name, _ in LATE_VARIABLES} | {"SM_NUM_GPUS"})
_UNPREFIXED_OPTIONS: Final = ("model_loading_timeout",)  # configuration.md 9, last row


class Resolver:
    """Turns rows and raw values into settings; everything found goes into its report."""

    def __init__(self, model: Layers, server: Layers, report: Report) -> None:
        self.model = model
        self.server = server
        self.report = report
        self.used: set[str] = set()
        self.extra: list[Setting] = []

    def options(self) -> dict[str, Setting]:
        """Every option of the table that is set or has a default."""
        resolved = {}
        for row in OPTIONS:
            keys = [f"{FILE_PREFIX}{name}" for name in (row.name, *row.aliases)]
            if row.name in _UNPREFIXED_OPTIONS and keys[0] not in self.model.winners:
                keys.append(row.name)
            setting = self._settle(row, self._take(self.model, keys))
            if setting is not None:
                resolved[row.name] = setting
        return resolved

    def server_settings(self) -> dict[str, Setting]:
        """Every server setting that is set or has a default."""
        resolved = {}
        for row in SERVER_SETTINGS:
            found = []
            if FILE in row.written:
                found += self._take(self.model, (row.name, *row.aliases))
            if not found and row.written != (FILE,) and self._may_count(row):
                found += [raw for raw in (self.server.winners.get(row.name),) if raw]
            setting = self._settle(row, found)
            if setting is not None:
                resolved[row.name] = setting
        return resolved

    def _may_count(self, row: Option) -> bool:
        """Whether the server level's value may count: some keys are read from variables only."""
        raw = self.server.winners.get(row.name)
        return raw is None or raw.origin.isupper() or "config" in row.written

    def environment(self, environ: Mapping[str, str]) -> dict[str, Setting]:
        """Every whole-variable setting that is set or has a default."""
        resolved = {}
        for row in ENVIRONMENT_SETTINGS:
            text = environ.get(row.name, "")
            found = [RawValue(row.name, text, row.name)] if text else []
            setting = self._settle(row, found)
            if setting is not None:
                resolved[row.name] = setting
        return resolved

    def _take(self, layers: Layers, keys: Iterable[str]) -> list[RawValue]:
        """The texts under `keys`, without late ones where the option has its other name set."""
        self.used.update(keys)
        found = [layers.winners[key] for key in keys if key in layers.winners]
        typed = [raw for raw in found if raw.origin not in _LATE_ORIGINS]
        return typed or found

    def _settle(self, row: Option, found: list[RawValue]) -> Setting | None:
        """The row's one setting out of everything written for it."""
        parsed = [(raw, value) for raw in found if (value := self._parse(row, raw)) is not None]
        if not parsed:
            return None if row.default is None else self._default(row)
        (raw, value), *others = parsed
        clashing = [other for other, other_value in others if other_value != value]
        for other, other_value in others:
            note = f"clashes with {raw.key}" if other in clashing else f"same setting as {raw.key}"
            self.extra.append(self._setting(row, other, other_value, note))
        if clashing:
            self._fail_clash(raw, clashing)
            self.extra.append(self._setting(row, raw, value, f"clashes with {clashing[0].key}"))
            return None if row.default is None else self._default(row)
        return self._apply(row, self._setting(row, raw, value, self._note(row, raw)))

    def _fail_clash(self, raw: RawValue, clashing: list[RawValue]) -> None:
        """Report two names of one setting with different values: neither can be right."""
        for other in clashing:
            self.report.fail(
                f"{shown(raw)} and {shown(other)} are two names of one setting with different "
                f"values: set one of them"
            )

    def _parse(self, row: Option, raw: RawValue) -> object:
        """The text's value; None where it counts as unset or is wrong (then reported)."""
        reader = vllm_reader(row) if row.parse is as_vllm else row.parse
        if raw.text == "None" or (raw.text == "" and row.parse is not boolean):
            return None
        try:
            return reader(raw.text)
        except ValueError as error:
            self._reject(row, raw, str(error))
            return None

    def _reject(self, row: Option, raw: RawValue, reason: str) -> None:
        """Report a text that cannot be read."""
        sentence = f"{shown(raw)} cannot be used: {reason}"
        if row.is_lenient:
            self.report.warn(f"{sentence}; the default {row.default} stands")
        else:
            self.report.fail(sentence)

    def _setting(self, row: Option, raw: RawValue, value: object, note: str) -> Setting:
        """A setting that somebody wrote."""
        effect = row.effect
        target = ", ".join(effect.targets)
        return Setting(row.name, value, raw.origin, effect.word, target, note, raw.key)

    def _default(self, row: Option) -> Setting:
        """The row's default as a setting."""
        effect = row.effect
        target = ", ".join(effect.targets)
        return Setting(row.name, row.default, DEFAULT_ORIGIN, effect.word, target, row.note)

    def _note(self, row: Option, raw: RawValue) -> str:
        """The row's note, and what the value hides."""
        hidden = [shown(other) for other in (*self.model.hidden, *self.server.hidden)
                  if other.key == raw.key and other.origin != raw.origin]  # fmt: skip
        note = row.note or row.effect.text
        return f"{note} Hides {', '.join(hidden)}." if hidden else note

    def _apply(self, row: Option, setting: Setting) -> Setting | None:
        """The setting after its row's effect and value rule; None where it counts as unset."""
        effect = row.effect
        if setting.value in effect.quiet_for:
            return setting
        if effect.word is EffectWord.WARNS:
            self.report.warn(f"{setting.label} has no effect: {effect.text}")
        elif effect.word is EffectWord.REFUSES:
            self.report.fail(f"{setting.stated} is not possible: {effect.text}")
        rule = VALUE_RULES.get(row.name)
        if rule is None:
            return setting
        verdict = rule(setting)
        for sentence in verdict.warnings:
            self.report.warn(sentence)
        for sentence in verdict.errors:
            self.report.fail(sentence)
        return replace(setting, value=verdict.value)

    def pass_through(self) -> dict[str, Setting]:
        """Options outside the table that vLLM's command line knows."""
        release = load_release()
        resolved = {}
        for key, raw in self.model.winners.items():
            name = key.removeprefix(FILE_PREFIX)
            if key == name or key in self.used:
                continue
            if name in release.engine:
                argument = release.engine[name]
                effect = replace(_PASSES, targets=(name,))
                setting = self._settle(Option(name, as_vllm, effect, note=argument.help), [raw])
            elif name in release.front_end:
                row = Option(name, str, _FRONT_END, note=release.front_end[name].help)
                setting = self._settle(row, [raw])
            else:
                continue
            self.used.add(key)
            if setting is not None:
                resolved[name] = setting
        return resolved


_PASSES: Final = replace(OPTIONS[0].effect, is_computed=False, targets=())
_FRONT_END: Final = replace(
    _PASSES,
    word=EffectWord.WARNS,
    text="it belongs to vLLM's own HTTP server, which this server replaces",
)


def vllm_reader(row: Option) -> Parser:
    """VLLM's own reading of the row's first target."""
    argument = load_release().engine[row.effect.targets[0]]
    return lambda text: coerce(argument, text)


def is_strict(environ: Mapping[str, str], command_line: CommandLine) -> bool:
    """Whether unknown names are errors."""
    try:
        return command_line.strict or boolean(environ.get("LMI_STRICT") or "false")
    except ValueError:
        return False  # reported as a bad value of LMI_STRICT


def resolve_settings(found: Found, report: Report) -> Settings:
    """The settings that the merged texts mean."""
    strict = is_strict(found.environ, found.command_line)
    resolver = Resolver(found.model, found.server, report)
    options = resolver.options()
    settings = resolver.server_settings() | resolver.environment(found.environ)
    options |= resolver.pass_through()
    unknown = UnknownNames(found, frozenset(resolver.used), report, strict)
    extra = (*resolver.extra, *unknown.collect())
    if found.command_line.strict:
        settings["LMI_STRICT"] = replace(settings["LMI_STRICT"], value=True, origin="--strict")
    settings["inference_address"] = settle_address(
        settings["inference_address"], found.environ, found.command_line, report.fail
    )
    check_listen(settings, report.fail)
    check_front_ends(settings, report.fail)
    _report_model_ids(found.model, report)
    _report_queue(settings["job_queue_size"], options["max_rolling_batch_size"], report)
    exports = options["env"].value if "env" in options else {}
    return Settings(
        options=MappingProxyType(options),
        server=MappingProxyType(settings),
        extra=extra,
        warnings=report.warnings,
        errors=report.errors,
        environment_exports=MappingProxyType(exports if isinstance(exports, dict) else {}),
        properties=found.file,
    )


def _report_model_ids(model: Layers, report: Report) -> None:
    """Warn once about model ids that differ from the one that counts."""
    key = f"{FILE_PREFIX}model_id"
    winner = model.winners.get(key)
    others = [raw for raw in model.hidden if raw.key == key and winner and raw.text != winner.text]
    if winner and others:
        names = ", ".join(f"{mask_text('model_id', raw.text)} ({raw.origin})" for raw in others)
        report.warn(
            f"model id {mask_text('model_id', winner.text)} ({winner.origin}) is served; "
            f"not used: {names}"
        )


def _report_queue(queue: Setting, batch: Setting, report: Report) -> None:
    """Warn about a queue that cannot fill one batch."""
    if isinstance(queue.value, int) and isinstance(batch.value, int) and queue.value < batch.value:
        report.warn(
            f"job_queue_size={queue.value} ({queue.origin}) is below max_rolling_batch_size="
            f"{batch.value} ({batch.origin}): the batch can never be full"
        )
