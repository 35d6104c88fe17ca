"""The origin of a value: of settings, and of the engine arguments that follow from them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class OriginKind(StrEnum):
    """The kinds of places; they decide what a value may mean and which of two counts."""

    DEFAULT = "default"  # nothing was written
    FLAG = "flag"  # of the command line
    PLATFORM = "platform"  # a SageMaker variable that overrides serving.properties
    FILE = "file"  # serving.properties or config.properties, with the line
    HUB = "hub"  # HF_MODEL_ID, HF_REVISION, HF_TASK
    VARIABLE = "variable"  # an environment variable of the setting's own name
    ALIAS = "alias"  # an alias of the setting's variable
    LATE = "late"  # a variable that counts only while the option is written nowhere else
    DERIVED = "derived"  # computed from the model or the machine


@dataclass(frozen=True, slots=True)
class Origin:
    """One place; `str()` is how messages name it."""

    kind: OriginKind
    name: str
    line: int | None = None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name} line {self.line}"

    @property
    def is_default(self) -> bool:
        """Whether nothing was written."""
        return self.kind is OriginKind.DEFAULT


DEFAULT_ORIGIN: Final = Origin(OriginKind.DEFAULT, "default")
