"""A row of the option table; the fields of the section classes are the table itself.

Each name that a user may write is one field, and is described only there. Parsing, translation,
`explain`, the reference page and the JSON schema are made from these rows. The settings are
instances of the same classes. To add an option, add a field to its section. To add an alias, add it
to the field's `aliases`. A field has the name of its option. If that is no Python identifier, or is
in camel case, `name` has it. The name of an environment variable is the field's name in upper case.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Final, TypedDict, TypeVar, Unpack, cast, overload

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.parsers import Parser

T = TypeVar("T")
Default = TypeVar("Default")

OTHER_BACKENDS: Final = "Options of other backends"
DROPPED: Final = "Arguments vLLM has dropped"
ENVIRONMENT: Final = "Environment"

FILE: Final = "file"  # serving.properties, without prefix
ENV: Final = "serving"  # SERVING_<NAME>
CONFIG: Final = "config"  # config.properties
EVERYWHERE: Final = (FILE, ENV, CONFIG)
SERVER_LEVEL: Final = (ENV, CONFIG)


class EffectWord(StrEnum):
    """The effect of a setting, in the words that `explain` prints."""

    MAPS_TO = "maps_to"  # it becomes an engine argument
    OURS = "ours"  # the server itself obeys it
    WARNS = "warns"  # accepted, without effect, one warning
    REFUSES = "refuses"  # the start fails
    NONE = "none"  # accepted, without effect or warning
    UNKNOWN = "unknown"  # an unknown name; no row has this effect


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of an option.

    `targets` are engine arguments. With `is_computed` a rule of the translation computes them. With
    `is_fallback` the option counts only if the target is not set otherwise. `text` is the warning
    or the advice; values in `quiet_for` cause none.
    """

    word: EffectWord
    targets: tuple[str, ...] = ()
    text: str = ""
    is_computed: bool = False
    is_fallback: bool = False
    quiet_for: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One row. `written` says where a server setting may be written: FILE, ENV, CONFIG."""

    parse: Parser
    effect: Effect
    name: str = ""
    aliases: tuple[str, ...] = ()
    default: object = None
    section: str = ""
    note: str = ""
    values: str = ""
    is_lenient: bool = False  # a bad value is a warning and the default stands
    written: tuple[str, ...] = ()
    attribute: str = ""  # of the settings object


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows by where they are written: as options of the model, as server settings, as variables."""

    options: tuple[Option, ...]
    server: tuple[Option, ...]
    variables: tuple[Option, ...]

    @classmethod
    def of(cls, rows: Iterable[Option]) -> "Rows":
        """These rows, grouped by where they may be written."""
        collected = tuple(rows)
        variables = tuple(row for row in collected if row.section == ENVIRONMENT)
        server = tuple(row for row in collected if row.written)
        options = tuple(row for row in collected if not row.written and row.section != ENVIRONMENT)
        return cls(options, server, variables)


class _Row(TypedDict, total=False):
    """The arguments of `option` besides parser, effect and default; see Option."""

    aliases: tuple[str, ...]
    name: str
    section: str
    note: str
    values: str
    is_lenient: bool
    written: tuple[str, ...]


@overload
def option(
    parse: Callable[[str], T], effect: Effect, *, default: Default, **row: Unpack[_Row]
) -> T | Default: ...


@overload
def option(parse: Callable[[str], T], effect: Effect, **row: Unpack[_Row]) -> T | None: ...


def option(parse: Parser, effect: Effect, *, default: object = None, **row: Unpack[_Row]) -> object:
    """The pydantic field of one option; its type is the return type of `parse`."""
    field = cast("FieldInfo", Field(default=default))
    field.metadata.append(Option(parse, effect, default=default, **row))
    return field


class Section(BaseModel):
    """A part of the option table: `option`, or a function that calls it, makes every field."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", defer_build=True)
    section: ClassVar[str] = ""
    rows: ClassVar[tuple[Option, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """Collect the rows: those of the base classes in their order, then the class's own."""
        parts = [base for base in cls.__bases__ if issubclass(base, Section)]
        own = {name: field for name, field in cls.model_fields.items() if name in _names(cls)}
        cls.rows = (*(row for part in parts for row in part.rows), *_rows(cls.section, own))


def _names(cls: type[Section]) -> Collection[str]:
    """The fields that a class declares itself."""
    names: Collection[str] = vars(cls).get("__annotations__", {})
    return names


def _rows(section: str, fields: Mapping[str, FieldInfo]) -> Iterator[Option]:
    """The rows of the fields that are options, with the names that users write."""
    for attribute, field in fields.items():
        for row in field.metadata:
            if isinstance(row, Option):
                title = row.section or section
                name = attribute.upper() if title == ENVIRONMENT else attribute
                yield replace(row, name=row.name or name, attribute=attribute, section=title)


def maps_to(*targets: str) -> Effect:
    """The value becomes the engine argument unchanged."""
    return Effect(EffectWord.MAPS_TO, targets)


def computes(*targets: str) -> Effect:
    """A rule of translate/arguments.py computes engine arguments from the value."""
    return Effect(EffectWord.MAPS_TO, targets, is_computed=True)


def ours(*targets: str) -> Effect:
    """The server itself obeys the value, and passes it to the engine arguments `targets`."""
    return Effect(EffectWord.OURS, targets)


def warns(text: str, quiet_for: tuple[object, ...] = ()) -> Effect:
    """Accepted without effect; `text` is the reason, or names the replacement."""
    return Effect(EffectWord.WARNS, (), text, quiet_for=quiet_for)


def warned_later(text: str) -> Effect:
    """Accepted without effect; a rule of translate/rules.py decides whether to warn."""
    return Effect(EffectWord.WARNS, (), text, is_computed=True)


def refuses(text: str, quiet_for: tuple[object, ...] = ()) -> Effect:
    """The start fails; `text` says what to use instead."""
    return Effect(EffectWord.REFUSES, (), text, quiet_for=quiet_for)


def no_effect(text: str = "") -> Effect:
    """Accepted; there is nothing to do."""
    return Effect(EffectWord.NONE, (), text)


def status(default: int, note: str) -> int:
    """A field for a status code the user may choose."""
    return option(
        parse.status_code,
        ours(),
        default=default,
        note=note,
        values="HTTP status",
        written=SERVER_LEVEL,
    )


def workers(note: str, name: str = "") -> int | None:
    """A field for a worker count of serving.properties."""
    return option(parse.count, ours(), name=name, note=note, values="number", written=(FILE,))


@overload
def variable(
    parse: Callable[[str], T], note: str, *, default: Default, values: str = ...
) -> T | Default: ...


@overload
def variable(parse: Callable[[str], T], note: str, *, values: str = ...) -> T | None: ...


def variable(parse: Parser, note: str, *, default: object = None, values: str = "text") -> object:
    """A field for a whole environment variable that the server itself obeys."""
    return option(parse, ours(), default=default, note=note, values=values)
