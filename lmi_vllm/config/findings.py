"""What reading the sources brings along: texts by level, and everything worth saying about them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmi_vllm.config.properties import PropertiesFile
from lmi_vllm.config.resolved import CommandLine, RawValue
from lmi_vllm.config.secrets import mask_text
from lmi_vllm.config.variable_names import FILE_PREFIX


@dataclass(slots=True)
class Report:
    """Warnings and errors in the order they were found, each once."""

    _warnings: dict[str, None] = field(default_factory=dict)
    _errors: dict[str, None] = field(default_factory=dict)

    def warn(self, sentence: str) -> None:
        """Note a warning."""
        self._warnings[sentence] = None

    def fail(self, sentence: str) -> None:
        """Note an error."""
        self._errors[sentence] = None

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
    """One level after merging: the text that counts for each key, and those it hides."""

    winners: Mapping[str, RawValue]
    hidden: tuple[RawValue, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Everything the sources hold."""

    environ: Mapping[str, str]
    command_line: CommandLine
    model: Layers
    server: Layers
    file: PropertiesFile | None
    config: PropertiesFile | None


def shown(raw: RawValue) -> str:
    """`key=text (origin)` without secrets."""
    name = raw.key.removeprefix(FILE_PREFIX)
    return f"{raw.key}={mask_text(name, raw.text)} ({raw.origin})"
