"""Texts with their origin, resolved settings, and the report of warnings and errors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from lmi_vllm.config.options.row import EffectWord, Option
from lmi_vllm.config.secrets import mask_text, mask_value
from lmi_vllm.messages import DEFAULT_ORIGIN, Origin, OriginKind

Owner = TypeVar("Owner")

FILE_PREFIX = "option."  # of a model's option in a properties file
UNSET_TEXTS = ("", "None")  # what parsers do not get to see; see docs/configuration.md


@dataclass(frozen=True, slots=True)
class RawValue:
    """The text that a source gives; `key` is as in the files (`option.quantize`, `engine`)."""

    key: str
    text: str
    origin: Origin

    @property
    def is_unset(self) -> bool:
        """Whether the text stands for no value."""
        return self.text in UNSET_TEXTS

    @property
    def stated(self) -> str:
        """`key=text (origin)` without secrets; a variable is its own origin."""
        said = f"{self.key}={mask_text(self.key.removeprefix(FILE_PREFIX), self.text)}"
        return said if self.key == str(self.origin) else f"{said} ({self.origin})"


Source = tuple[RawValue, ...]  # the texts that one kind of origin sets


@dataclass(frozen=True, slots=True)
class OtherSettings:
    """What flags or variables of another server say in this one's words.

    `errors` are refused values, `unknown` are names without a meaning: warnings, or errors where
    names are strict. `defaults` count where nothing else is set.
    """

    values: tuple[RawValue, ...] = ()
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    defaults: tuple[RawValue, ...] = ()
    is_tls: bool = False  # the listener speaks TLS, whatever the scheme of its address


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The command line of this start; None for a flag that was not given."""

    host: str | None = None
    port: int | None = None
    model: str | None = None
    model_flag: str = "--model"  # or MODEL: the word that belongs to no flag
    demo: bool = False
    strict: bool = False
    config_file: str | None = None
    model_store: str | None = None
    models: str | None = None
    vllm: OtherSettings = OtherSettings()  # the flags of `vllm serve`
    written: frozenset[str] = frozenset()  # the names of the flags, as they were written


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved setting: `name` is the table's, `written` the key that the user wrote."""

    name: str
    value: object
    origin: Origin
    effect: EffectWord
    targets: tuple[str, ...] = ()  # the engine arguments that it becomes
    note: str = ""
    written: str = ""

    @property
    def is_set(self) -> bool:
        """Whether it was written somewhere; False for a default."""
        return not self.origin.is_default

    @property
    def label(self) -> str:
        """How messages name it: the written key, and the place."""
        return f"{self.written or self.name} ({self.origin})"

    @property
    def stated(self) -> str:
        """Name, value and place, as messages quote the setting."""
        value = str(self.shown_value).lower() if isinstance(self.value, bool) else self.shown_value
        name, origin = self.written or self.name, str(self.origin)
        return f"{name}={value}" if name == origin else f"{name}={value} ({origin})"

    @property
    def shown_value(self) -> object:
        """The value as it may be printed."""
        return mask_value(self.name, self.value) if self.is_set else self.value


class Details(Mapping[str, Setting], Generic[Owner]):
    """Where the settings of an owner were written, and how messages name them.

    An attribute for each option of the owner; scripts/mypy_details.py has mypy know them. The one
    of an option without a value is a setting that is not set. As a mapping it has only those with a
    value, by the names that users write.
    """

    def __init__(self, settings: Mapping[str, Setting], rows: Iterable[Option]) -> None:
        self._settings = settings
        self._names = {row.attribute: row.name for row in rows}

    def __getattr__(self, field: str) -> Setting:
        if field.startswith("_") or field not in self._names:
            raise AttributeError(f"{field} is no option of these settings")
        name = self._names[field]
        return self._settings.get(name) or Setting(name, None, DEFAULT_ORIGIN, EffectWord.NONE)

    def __getitem__(self, name: str) -> Setting:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)


class Sentence(str):
    """A warning or an error, and which settings it is about."""

    about: frozenset[tuple[str, Origin]] = frozenset()

    @classmethod
    def of(cls, text: str, *about: Setting) -> Self:
        """The sentence about these settings."""
        sentence = cls(text)
        sentence.about = frozenset((setting.name, setting.origin) for setting in about)
        return sentence


@dataclass(slots=True)
class Report:
    """Warnings and errors in the order in which they were found, each once."""

    _warnings: dict[str, None] = field(default_factory=dict)
    _errors: dict[str, None] = field(default_factory=dict)

    def warn(self, text: str, *about: Setting) -> None:
        """Note a warning about these settings."""
        self._warnings[Sentence.of(text, *about)] = None

    def fail(self, text: str, *about: Setting) -> None:
        """Note an error about these settings."""
        self._errors[Sentence.of(text, *about)] = None

    def add(self, other: "Report") -> None:
        """Add everything that another report has."""
        self._warnings |= other._warnings
        self._errors |= other._errors

    @property
    def warnings(self) -> tuple[str, ...]:
        """Every warning, once."""
        return tuple(self._warnings)

    @property
    def errors(self) -> tuple[str, ...]:
        """Every error, once."""
        return tuple(self._errors)


@dataclass(frozen=True, slots=True)
class Layers:
    """One level after merging: the text that counts for each key, and the texts that it hides."""

    winners: Mapping[str, RawValue]
    hidden: tuple[RawValue, ...] = ()

    @classmethod
    def of(cls, sources: Sequence[Source]) -> "Layers":
        """The level of these sources, best first; in a source the last text of a key counts."""
        by_key: dict[str, list[RawValue]] = {}
        for source in reversed(sources):
            for key, raw in {raw.key: raw for raw in source}.items():
                by_key.setdefault(key, []).insert(0, raw)
        winners = {key: _counting(texts) for key, texts in by_key.items()}
        hidden = [raw for texts in by_key.values() for raw in texts if raw != winners[raw.key]]
        return cls(winners, tuple(hidden))


def _counting(texts: Sequence[RawValue]) -> RawValue:
    """The first text that is set, if there is one.

    A key that a file has without a value hides variables of the key's own name, as in LMI.
    """
    is_in_file = False
    for raw in texts:
        if not raw.is_unset and (not is_in_file or raw.origin.kind is OriginKind.LATE):
            return raw
        is_in_file = is_in_file or raw.origin.kind is OriginKind.FILE
    return texts[0]
