"""The meaning of the configuration as a table, JSON or markdown, with secrets masked."""

import json
from collections.abc import Callable, Iterable, Mapping
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

_NO_MODEL: Final = (
    "no model found: serve would stop; set HF_MODEL_ID, option.model_id or --model-store"
)
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
    values = translation.arguments.values
    return Explanation(
        engine_args={name: mask_value(name, value) for name, value in values.items()},
        server=_server(settings),
        options=tuple(_rows(settings, translation, defaults)),
        warnings=tuple(dict.fromkeys(map(hide, translation.warnings))),
        errors=tuple(dict.fromkeys(map(hide, translation.errors))),
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
            sentence = sentence.replace(secret, MASK)
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


def _rows(
    settings: Settings, translation: Translation, defaults: ExplainedDefaults
) -> Iterable[dict[str, object]]:
    """One row for each option with a value: written ones first."""
    known = [*settings.all_details(), *defaults.rows(settings)]
    if settings.model.model_id is None:
        known.insert(0, _model_row(translation))
    for setting in sorted([*known, *settings.others], key=lambda setting: not setting.is_set):
        yield {
            "name": setting.written.removeprefix("option.") or setting.name,
            "value": setting.shown_value,
            "origin": str(setting.origin),
            "effect": str(setting.effect),
            "target": ", ".join(setting.targets),
            "note": mask_urls(_note(setting, translation, defaults.note)),
        }


def _model_row(translation: Translation) -> Setting:
    """The row for a model without a model id, and for a start without a model."""
    model = translation.model
    if model is None:
        note = _NO_MODEL if translation.missing else _STARTS_WITHOUT
        return Setting("model_id", None, DEFAULT_ORIGIN, EffectWord.MAPS_TO, ("model",), note)
    note = "The model directory itself."
    origin = Origin(OriginKind.DERIVED, str(model.directory))
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


def as_document(explanation: Explanation) -> dict[str, object]:
    """The explanation as one JSON object."""
    return {field.name: getattr(explanation, field.name) for field in fields(explanation)}


def as_json(explanation: Explanation) -> str:
    """The explanation as the text of one JSON object."""
    return json.dumps(as_document(explanation), indent=2, ensure_ascii=False, default=str)


_COLUMNS: Final = ("name", "value", "origin", "effect", "target", "note")
_WIDEST: Final = MappingProxyType({"value": 40, "origin": 48})


def as_table(explanation: Explanation) -> str:
    """The explanation for a terminal."""
    lines = [*_aligned([_COLUMNS, *_cells(explanation)]), "", "Engine arguments"]
    lines += [f"  {name} = {_compact(value)}" for name, value in explanation.engine_args.items()]
    for title, sentences in _findings(explanation):
        lines += ["", title, *(f"  {sentence}" for sentence in sentences)]
    return "\n".join(lines)


def _findings(explanation: Explanation) -> Iterable[tuple[str, tuple[str, ...]]]:
    """The sentences below a table, each kind under its title."""
    kinds = {
        "Checked": explanation.checked,
        "Warnings": explanation.warnings,
        "Errors": explanation.errors,
    }
    return ((title, sentences) for title, sentences in kinds.items() if sentences)


def _cells(explanation: Explanation) -> list[tuple[str, ...]]:
    """The rows as short texts."""
    return [
        tuple(_clip(column, _compact(row[column])) for column in _COLUMNS)
        for row in explanation.options
    ]


def _clip(column: str, text: str) -> str:
    """`text` on one line, cut to the column's width."""
    line = " ".join(text.split())
    width = _WIDEST.get(column, len(line))
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def as_markdown(explanation: Explanation) -> str:
    """The explanation as a markdown document."""
    lines = ["# Configuration", "", _markdown_row(_COLUMNS), _markdown_row(["---"] * 6)]
    lines += [_markdown_row(cells) for cells in _cells(explanation)]
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
