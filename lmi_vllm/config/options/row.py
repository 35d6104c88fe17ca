"""What a row of the option table is; the fields of the section classes are the table itself.

One field per name that a user may write, described there and nowhere else: parsing, translation,
`explain`, the reference page and the JSON schema are all made from these rows, and the settings
are instances of the same classes. To add an option, add a field to its section; to add an alias,
add it to the field's `aliases`.

A field is called as its option. Where the option's name is no Python identifier, or in camel
case, `name` says it; a variable's name is its field's in upper case.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Final, TypedDict, TypeVar, Unpack, cast, overload

from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

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
    """What becomes of a setting; the words `explain` prints."""

    MAPS_TO = "maps_to"  # becomes an engine argument
    OURS = "ours"  # the server itself obeys it
    WARNS = "warns"  # accepted, no effect, one warning
    REFUSES = "refuses"  # start-up fails
    NONE = "none"  # accepted, no effect, nothing to say
    UNKNOWN = "unknown"  # no such name; the only word no row carries


@dataclass(frozen=True, slots=True)
class Effect:
    """What becomes of an option.

    `targets` are engine arguments. `is_computed`: translation has a rule of its own for it;
    `is_fallback`: it counts only where the target is not set otherwise. `text` is the warning or
    the advice; values in `quiet_for` draw none.
    """

    word: EffectWord
    targets: tuple[str, ...] = ()
    text: str = ""
    is_computed: bool = False
    is_fallback: bool = False
    quiet_for: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One row. `written` is where a server setting may stand: FILE, ENV, CONFIG."""

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
        """These rows; a whole variable is of that section, and a server setting says its places."""
        found = tuple(rows)
        variables = tuple(row for row in found if row.section == ENVIRONMENT)
        server = tuple(row for row in found if row.written)
        options = tuple(row for row in found if not row.written and row.section != ENVIRONMENT)
        return cls(options, server, variables)


class _Row(TypedDict, total=False):
    """What `option` takes besides parser, effect and default; see Option."""

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
    """The field of one option, as pydantic takes it; its type is what `parse` gives."""
    field = cast("FieldInfo", Field(default=default))
    field.metadata.append(Option(parse, effect, default=default, **row))
    return field


class Section(BaseSettings):
    """A part of the option table: every field is made by `option` or a function over it."""

    model_config = SettingsConfigDict(frozen=True, strict=True, extra="ignore", defer_build=True)
    section: ClassVar[str] = ""
    rows: ClassVar[tuple[Option, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """Collect the rows: those of the classes below, in their order, then the class's own."""
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
                name = attribute.upper() if section == ENVIRONMENT else attribute
                title = row.section or section
                yield replace(row, name=row.name or name, attribute=attribute, section=title)


def maps_to(*targets: str) -> Effect:
    """The value becomes the engine argument as it is."""
    return Effect(EffectWord.MAPS_TO, targets)


def computes(*targets: str) -> Effect:
    """Engine arguments follow from the value by a rule of translate/arguments.py."""
    return Effect(EffectWord.MAPS_TO, targets, is_computed=True)


def fallback_for(target: str, text: str = "") -> Effect:
    """The value becomes the engine argument where that is not set otherwise; `text` is warned."""
    return Effect(EffectWord.MAPS_TO, (target,), text, is_fallback=True)


def ours(*targets: str) -> Effect:
    """The server itself obeys the value (and hands it to `targets` of the engine)."""
    return Effect(EffectWord.OURS, targets)


def warns(text: str, quiet_for: tuple[object, ...] = ()) -> Effect:
    """Accepted without effect; `text` says why or what does it today."""
    return Effect(EffectWord.WARNS, (), text, quiet_for=quiet_for)


def warned_later(text: str) -> Effect:
    """Accepted without effect; a rule of translate/rules.py decides whether that is warned of."""
    return Effect(EffectWord.WARNS, (), text, is_computed=True)


def refuses(text: str, quiet_for: tuple[object, ...] = ()) -> Effect:
    """Start-up fails; `text` says what to use instead."""
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
