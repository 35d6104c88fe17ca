"""Merged texts -> settings: parse them, settle double names, and report those without effect."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from lmi_vllm.config.options import OPTIONS
from lmi_vllm.config.options.row import FILE, EffectWord, Option
from lmi_vllm.config.parsers import Parser, as_vllm, boolean, verbatim
from lmi_vllm.config.secrets import mask_text
from lmi_vllm.config.setting import FILE_PREFIX, Layers, RawValue, Report, Setting
from lmi_vllm.config.value_rules import VALUE_RULES
from lmi_vllm.config.vllm_schema import coerce, load_release
from lmi_vllm.messages import DEFAULT_ORIGIN, OriginKind

# Also written without a prefix in serving.properties, as LMI reads it.
_UNPREFIXED_OPTIONS: Final = ("model_loading_timeout", "normalize")


_VARIABLES: Final = frozenset((OriginKind.VARIABLE, OriginKind.ALIAS))
_HIDING: Final = _VARIABLES | {OriginKind.FILE}
_HIDDEN: Final = _VARIABLES | {OriginKind.LATE}


class Resolver:
    """Turns rows and texts of one level into settings; warnings and errors go into `report`.

    `first` has resolved the model's level, which contains server settings, too. `extra` are second
    names of settings. `used` are the model's keys that have a meaning. Both continue those of
    `first`.
    """

    def __init__(self, layers: Layers, report: Report, first: "Resolver | None" = None) -> None:
        self.report = report
        self.layers = layers
        self.model = layers if first is None else first.layers
        self.used: set[str] = set() if first is None else first.used
        self.extra: list[Setting] = [] if first is None else first.extra

    def options(self, rows: Iterable[Option]) -> dict[str, Setting]:
        """Every option of these rows that is set or has a default."""
        resolved = {}
        for row in rows:
            keys = [f"{FILE_PREFIX}{name}" for name in (row.name, *row.aliases)]
            if row.name in _UNPREFIXED_OPTIONS:
                self._add_bare(row, keys)
            setting = self._resolve(row, self._texts_of(self.model, keys))
            if setting is not None:
                resolved[row.name] = setting
        return resolved

    def _add_bare(self, row: Option, keys: list[str]) -> None:
        """Use the name without a prefix if the option is not set; else report that."""
        bare, winner = (self.model.winners.get(key) for key in (row.name, keys[0]))
        if winner is None or winner.is_unset:
            keys.append(row.name)
        elif bare is not None:
            self.used.add(row.name)
            sentence = f"{bare.stated} has no effect: {winner.stated} is set"
            self.report.warn(sentence)
            self.extra.append(self._setting(row, bare, bare.text, sentence))

    def server_settings(self, rows: Iterable[Option]) -> dict[str, Setting]:
        """Every server setting of these rows that is set or has a default."""
        resolved = {}
        for row in rows:
            candidates = []
            if FILE in row.written:
                candidates += self._texts_of(self.model, (row.name, *row.aliases))
            if not candidates and row.written != (FILE,):
                candidates += [raw for raw in (self.layers.winners.get(row.name),) if raw]
            setting = self._resolve(row, candidates)
            if setting is not None:
                resolved[row.name] = setting
        return resolved

    def variables(self, rows: Iterable[Option]) -> dict[str, Setting]:
        """Every whole variable of these rows that is set, by a flag or itself, or has a default."""
        resolved = {}
        for row in rows:
            raw = self.layers.winners.get(row.name)
            setting = self._resolve(row, [raw] if raw else [])
            if setting is not None:
                resolved[row.name] = setting
        return resolved

    def _texts_of(self, layers: Layers, keys: Iterable[str]) -> list[RawValue]:
        """The texts under `keys`; late ones count only if the option is otherwise unset."""
        self.used.update(keys)
        candidates = [layers.winners[key] for key in keys if key in layers.winners]
        if candidates and candidates[0].origin.kind is OriginKind.FLAG:
            return candidates[:1]  # it wins over every other name, too
        typed = [raw for raw in candidates if raw.origin.kind is not OriginKind.LATE]
        if all(raw.is_unset for raw in typed):
            return candidates
        for late in candidates:
            if late not in typed and late.key != typed[0].key and late.text != typed[0].text:
                self.report.warn(f"{late.stated} is not used: {typed[0].stated} comes first")
        return typed

    def _resolve(self, row: Option, found: list[RawValue]) -> Setting | None:
        """The row's setting: the first of `found` that is valid, after effect and value rule."""
        parsed = [(raw, value) for raw in found if (value := self._parse(row, raw)) is not None]
        if not parsed:
            return None if row.default is None else self._default(row)
        (raw, value), *others = parsed
        conflicting = [other for other, other_value in others if other_value != value]
        for other, other_value in others:
            note = (
                f"clashes with {raw.key}" if other in conflicting else f"same setting as {raw.key}"
            )
            self.extra.append(self._setting(row, other, other_value, note))
        if conflicting:
            self._report_conflict(raw, conflicting)
            self.extra.append(self._setting(row, raw, value, f"clashes with {conflicting[0].key}"))
            return None if row.default is None else self._default(row)
        return self._apply(row, self._setting(row, raw, value, self._note(row, raw)))

    def _report_conflict(self, raw: RawValue, conflicting: list[RawValue]) -> None:
        """Report two names of one setting with different values."""
        for other in conflicting:
            self.report.fail(
                f"{raw.stated} and {other.stated} are two names of one setting with different "
                f"values: set one of them"
            )

    def _parse(self, row: Option, raw: RawValue) -> object:
        """The text's value; None if it counts as unset, or is wrong and was reported."""
        reader = vllm_reader(row) if row.parse is as_vllm else row.parse
        is_value = (row.parse is boolean and raw.text == "") or row.parse is verbatim
        if raw.is_unset and not is_value:
            return None
        try:
            return reader(raw.text)
        except ValueError as error:
            self._reject(row, raw, str(error))
            return None

    def _reject(self, row: Option, raw: RawValue, reason: str) -> None:
        """Report a text that cannot be read."""
        sentence = f"{raw.stated} cannot be used: {reason}"
        if row.is_lenient:
            self.report.warn(f"{sentence}; the default {row.default} stands")
        else:
            self.report.fail(sentence)

    def _setting(self, row: Option, raw: RawValue, value: object, note: str) -> Setting:
        """A setting that was written."""
        effect = row.effect
        return Setting(row.name, value, raw.origin, effect.word, effect.targets, note, raw.key)

    def _default(self, row: Option) -> Setting:
        """The row's default as a setting."""
        effect = row.effect
        word, targets = effect.word, effect.targets
        return Setting(row.name, row.default, DEFAULT_ORIGIN, word, targets, row.note)

    def _note(self, row: Option, raw: RawValue) -> str:
        """The row's note, and the value that the setting hides."""
        written = dict.fromkeys((*self.model.hidden, *self.layers.hidden))
        hidden = [other.stated for other in written
                  if other.key == raw.key and other.origin != raw.origin
                  and not other.is_unset]  # fmt: skip
        note = row.note or row.effect.text
        return f"{note} Hides {', '.join(hidden)}." if hidden else note

    def _apply(self, row: Option, setting: Setting) -> Setting | None:
        """The setting after its row's effect and value rule; None if it counts as unset."""
        effect = row.effect
        if setting.value in effect.quiet_for:
            return setting
        if effect.word is EffectWord.WARNS and not effect.is_computed:
            self.report.warn(f"{setting.label} has no effect: {effect.text}", setting)
        elif effect.word is EffectWord.REFUSES:
            self.report.fail(f"{setting.stated} is not possible: {effect.text}", setting)
        rule = VALUE_RULES.get(row.name)
        if rule is None:
            return setting
        verdict = rule(setting)
        for sentence in verdict.warnings:
            self.report.warn(sentence, setting)
        for sentence in verdict.errors:
            self.report.fail(sentence, setting)
        return replace(setting, value=verdict.value)

    def pass_through(self) -> dict[str, Setting]:
        """Options outside the table that are arguments of vLLM's command line."""
        release = load_release()
        resolved = {}
        for key, raw in self.model.winners.items():
            name = key.removeprefix(FILE_PREFIX)
            if key == name or key in self.used:
                continue
            if argument := release.passed.get(name):
                effect = replace(_PASSES, targets=(name,))
                setting = self._resolve(Option(as_vllm, effect, name, note=argument.help), [raw])
            elif name in release.front_end:
                row = Option(str, _FRONT_END, name, note=release.front_end[name].help)
                setting = self._resolve(row, [raw])
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
    """Return vLLM's own parser of the row's first target."""
    argument = load_release().passed[row.effect.targets[0]]
    return lambda text: coerce(argument, text)


def _says_the_same(text: str, other: str) -> bool:
    """Whether two texts are equal, or two words for one of true and false."""
    try:
        return text == other or boolean(text) == boolean(other)
    except ValueError:
        return False


def report_hidden(model: Layers, report: Report) -> None:
    """Warn of model ids that differ from the one that counts, and of variables that do not count.

    A variable that a file or another variable hides surprises the operator: the file came with the
    model, the other was set for another server. A flag that hides one was typed for this very
    start.
    """
    for key, winner in model.winners.items():
        others = [
            raw
            for raw in model.hidden
            if raw.key == key and not _says_the_same(raw.text, winner.text)
        ]
        if others and key == f"{FILE_PREFIX}model_id":
            names = ", ".join(f"{mask_text('model_id', raw.text)} ({raw.origin})" for raw in others)
            report.warn(
                f"model id {mask_text('model_id', winner.text)} ({winner.origin}) is served; "
                f"not used: {names}"
            )
        elif winner.origin.kind in _HIDING:
            for raw in others:
                if raw.origin.kind in _HIDDEN:
                    report.warn(f"{raw.stated} is not used: {winner.stated} comes first")
