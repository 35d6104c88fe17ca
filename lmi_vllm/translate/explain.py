"""The meaning of the configuration as a table, JSON or markdown, with secrets masked."""

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.options.row import EffectWord
from lmi_vllm.config.secrets import MASK, is_secret, mask_urls, mask_value
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import Settings
from lmi_vllm.messages import DEFAULT_ORIGIN, Origin, OriginKind
from lmi_vllm.translate.arguments import Translation
from lmi_vllm.translate.draft import ExplainedNote, ExplainedRows

_BUILT_IN: Final = "the built-in handler"
_NO_MODEL: Final = (
    "no model found: serve would stop; set HF_MODEL_ID, option.model_id or --model-store"
)
_SHORT_SECRET: Final = 6
_STARTS_WITHOUT: Final = "The server starts without a model: POST /models loads one."


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that `explain` prints; it has no secrets."""

    engine_args: Mapping[str, object]
    server: Mapping[str, object]
    options: tuple[Mapping[str, object], ...]
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    checked: tuple[str, ...] = ()  # by `validate`
    # For a table; the JSON document has them among the warnings and the options.
    memory: str = ""  # the estimate of `validate`, where it fits
    changed_defaults: frozenset[str] = frozenset()  # options at a default that the guides lack

    @property
    def exit_code(self) -> int:
        """0, or 2 when there is an error."""
        return 2 if self.errors else 0


@dataclass(frozen=True, slots=True)
class ExplainedDefaults:
    """What `explain` adds about defaults: a note on a setting (empty for none), and rows."""

    note: ExplainedNote = lambda _: ""
    rows: ExplainedRows = lambda _: ()


def explain(translation: Translation, defaults: ExplainedDefaults) -> Explanation:
    """The explanation of a translation, without secrets."""
    settings, hide = translation.settings, _secret_hider(translation.settings)
    values, known = translation.arguments.values, _known(translation, defaults)
    return Explanation(
        engine_args={name: mask_value(name, value) for name, value in values.items()},
        server=_server(settings),
        options=tuple(_row(setting, translation, defaults.note) for setting in known),
        warnings=tuple(dict.fromkeys(map(hide, translation.warnings))),
        errors=tuple(dict.fromkeys(map(hide, translation.errors))),
        changed_defaults=frozenset(
            _name(one) for one in known if not one.is_set and defaults.note(one)
        ),
    )


def _secret_hider(settings: Settings) -> Callable[[str], str]:
    """A function that hides every configured secret in a sentence."""
    secrets = {
        str(setting.value)
        for setting in settings.all_details()
        if setting.is_set and is_secret(setting.name) and not isinstance(setting.value, bool | int)
    }

    def hide(sentence: str) -> str:
        """`sentence` without secrets."""
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            pattern = re.escape(secret)
            if len(secret) < _SHORT_SECRET:  # its letters are parts of words, too
                pattern = rf"(?<!\w){pattern}(?!\w)"
            sentence = re.sub(pattern, MASK, sentence)
        return mask_urls(sentence)

    return hide


def _server(settings: Settings) -> dict[str, object]:
    """Every setting that the server itself obeys, by its name in the table."""
    ours = [
        setting
        for setting in settings.all_details()
        if setting.effect in (EffectWord.OURS, EffectWord.NONE) or setting.name == "load_on_devices"
    ]
    return {setting.name: setting.shown_value for setting in ours}


def _known(translation: Translation, defaults: ExplainedDefaults) -> list[Setting]:
    """The options with a value: written ones first."""
    settings = translation.settings
    known = [*settings.all_details(), *defaults.rows(settings)]
    if settings.model.model_id is None:
        known.insert(0, _model_row(translation))
    return sorted([*known, *settings.others], key=lambda setting: not setting.is_set)


def _row(setting: Setting, translation: Translation, note: ExplainedNote) -> dict[str, object]:
    is_built_in = setting.name == "entryPoint" and setting.is_set and setting.value is None
    return {
        "name": _name(setting),
        "value": _BUILT_IN if is_built_in else setting.shown_value,
        "origin": str(setting.origin),
        "effect": str(setting.effect),
        "target": ", ".join(setting.targets),
        "note": mask_urls(_note(setting, translation, note)),
    }


def _name(setting: Setting) -> str:
    return setting.written.removeprefix("option.") or setting.name


def _model_row(translation: Translation) -> Setting:
    """The row for a model without a model id, and for a start without a model."""
    model = translation.model
    if model is None:
        note = _NO_MODEL if translation.missing else _STARTS_WITHOUT
        return Setting("model_id", None, DEFAULT_ORIGIN, EffectWord.MAPS_TO, ("model",), note)
    note, listed = "The model directory itself.", translation.settings.server.details.load_models
    origin = Origin(OriginKind.DERIVED, str(model.directory or model.model))
    if model.directory is None and listed.is_set:
        note, origin = "Named by load_models.", listed.origin
    return Setting("model_id", model.model, origin, EffectWord.MAPS_TO, ("model",), note)


def _note(setting: Setting, translation: Translation, note: ExplainedNote) -> str:
    """The row's note, and the engine argument if it differs from the value."""
    values = translation.arguments.values
    became = [
        f"{target}={_compact(mask_value(target, values[target]))}"
        for target in setting.targets
        if setting.is_set and target in values and values[target] != setting.value
        and translation.arguments.origins.get(target) == setting.origin
    ]  # fmt: skip
    said = [setting.note, note(setting)]
    said += [f"Became {', '.join(became)}."] if became else []
    return " ".join(filter(None, said))


def _compact(value: object) -> str:
    """`value` as short JSON; text without quotes."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


_TABLE_ONLY: Final = ("memory", "changed_defaults")


def as_document(explanation: Explanation) -> dict[str, object]:
    """The explanation as one JSON object."""
    names = [field.name for field in fields(explanation) if field.name not in _TABLE_ONLY]
    return {name: getattr(explanation, name) for name in names}


def as_json(explanation: Explanation) -> str:
    """The explanation as the text of one JSON object."""
    return json.dumps(as_document(explanation), indent=2, ensure_ascii=False, default=str)


_COLUMNS: Final = ("name", "value", "origin", "effect", "target")
_WIDEST: Final = MappingProxyType({"value": 40, "origin": 48})
_TEXT_WIDTH: Final = 100  # of the notes below the rows
_NOTE_INDENT: Final = " " * 4
_SET, _CHANGED, _QUIET = "Set", "Defaults that LMI's guides have otherwise", "Defaults"


def as_table(explanation: Explanation, *, is_whole: bool = False) -> str:
    """The explanation for a terminal: what is set, and the defaults that may surprise."""
    groups: dict[str, list[Mapping[str, object]]] = {_SET: [], _CHANGED: [], _QUIET: []}
    for row in explanation.options:
        if row["origin"] != str(DEFAULT_ORIGIN):
            groups[_SET].append(row)
        else:
            changed = row["name"] in explanation.changed_defaults
            groups[_CHANGED if changed else _QUIET].append(row)
    # `validate` is asked what is wrong, and `explain` what the defaults are.
    left_out = [] if is_whole else [_QUIET, *([_CHANGED] if explanation.checked else [])]
    quiet = sum(len(groups.pop(title)) for title in left_out)
    lines = []
    for title, rows in groups.items():
        lines += [title, *_noted(rows), ""] if rows else []
    if not is_whole:
        lines += [f"{quiet} more options are at their defaults: --all shows them", ""]
    if is_whole or not explanation.checked:
        arguments = explanation.engine_args.items()
        lines += [
            "Engine arguments",
            *(f"  {name} = {_compact(value)}" for name, value in arguments),
        ]
        lines.append("")
    for title, sentences in _findings(explanation):
        lines += [title, *(f"  {sentence}" for sentence in sentences), ""]
    return "\n".join(lines[:-1])


def _noted(rows: Sequence[Mapping[str, object]]) -> Iterable[str]:
    """The rows in columns, the note of each below it."""
    aligned = _aligned([_cells(row) for row in rows])
    for line, row in zip(aligned, rows, strict=True):
        yield line
        yield from textwrap.wrap(
            str(row["note"]), _TEXT_WIDTH, initial_indent=_NOTE_INDENT,
            subsequent_indent=_NOTE_INDENT, break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


def _findings(explanation: Explanation) -> Iterable[tuple[str, tuple[str, ...]]]:
    """The sentences below a table, each kind under its title."""
    kinds = {
        "Checked": explanation.checked,
        "Memory": tuple(_clauses(explanation.memory)),
        "Warnings": tuple(one for one in explanation.warnings if one != explanation.memory),
        "Errors": explanation.errors,
    }
    return ((title, sentences) for title, sentences in kinds.items() if sentences)


def _clauses(estimate: str) -> Iterable[str]:
    """The estimate without its formula, a clause a line."""
    said, formula, _ = estimate.partition(". Formula: ")
    yield from filter(None, said.split("; "))
    if formula:
        yield "--format json has the formula"


def _cells(row: Mapping[str, object]) -> tuple[str, ...]:
    """The row as short texts."""
    return tuple(_clip(column, _compact(row[column])) for column in _COLUMNS)


def _clip(column: str, text: str) -> str:
    """`text` on one line, cut to the column's width; an origin keeps its end, the file and line."""
    line = " ".join(text.split())
    width = _WIDEST.get(column, len(line))
    if len(line) <= width:
        return line
    return f"…{line[1 - width :]}" if column == "origin" else f"{line[: width - 1]}…"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def as_markdown(explanation: Explanation) -> str:
    """The explanation as a markdown document."""
    columns = (*_COLUMNS, "note")
    lines = ["# Configuration", "", _markdown_row(columns), _markdown_row(["---"] * len(columns))]
    lines += [_markdown_row([*_cells(row), str(row["note"])]) for row in explanation.options]
    arguments = [
        _markdown_row([name, _compact(value)]) for name, value in explanation.engine_args.items()
    ]
    lines += ["", "## Engine arguments", "", "| argument | value |", "| --- | --- |", *arguments]
    for title, sentences in _findings(explanation):
        lines += ["", f"## {title}", "", *(f"* {sentence}" for sentence in sentences)]
    return "\n".join(lines)


def _markdown_row(cells: Iterable[str]) -> str:
    """One table row; bars inside a cell are escaped."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


FORMATS: Final[Mapping[str, Callable[[Explanation], str]]] = MappingProxyType(
    {"table": as_table, "json": as_json, "markdown": as_markdown}
)


def formatted(explanation: Explanation, form: str, *, is_whole: bool) -> str:
    """The explanation in one of `FORMATS`; a table leaves out defaults unless it `is_whole`."""
    if form == "table":
        return as_table(explanation, is_whole=is_whole)
    return FORMATS[form](explanation)
