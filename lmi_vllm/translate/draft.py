"""The working copy that the translation rules change."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from lmi_vllm.checks.model import OwnEngines
from lmi_vllm.config.option_table import OptionTable
from lmi_vllm.config.setting import Sentence, Setting
from lmi_vllm.config.settings import Settings
from lmi_vllm.messages import DEFAULT_ORIGIN, ModelArtifacts, Origin, OriginKind
from lmi_vllm.sources.table import Sources
from lmi_vllm.translate.devices import Devices

# Origins of copies that no setting asks for.
FREE_GPUS: Final = Origin(OriginKind.DERIVED, "free GPUs")


@dataclass(slots=True)
class ArgumentDraft:
    """The settings, and the arguments, warnings and errors so far."""

    settings: Settings
    model: ModelArtifacts | None
    devices: Devices
    options: OptionTable
    sources: Sources
    engines: OwnEngines
    # What a start reads, `option.env` included; None where no start is meant.
    environ: Mapping[str, str] | None = field(default=None, repr=False)
    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    # The model's own config.json; empty if it is not known.
    config: Mapping[str, object] = field(default_factory=dict)
    # What `max` may mean: sizes that the model can be split into; empty for any.
    tensor_sizes: tuple[int, ...] = ()
    takes_copies: bool = True  # copies over free GPUs, if no setting asks for them

    def put(self, argument: str, value: object, origin: Origin) -> None:
        """Set an engine argument."""
        self.values[argument] = value
        self.origins[argument] = origin

    def put_if_unset(self, argument: str, value: object, origin: Origin) -> None:
        """Set an engine argument, unless it is set."""
        if argument not in self.values:
            self.put(argument, value, origin)

    def warn(self, text: str, *about: Setting) -> None:
        """Note a warning about these settings."""
        self.warnings.append(Sentence.of(text, *about))

    def fail(self, text: str, *about: Setting) -> None:
        """Note an error about these settings."""
        self.errors.append(Sentence.of(text, *about))

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures in the model's config.json."""
        named = self.config.get("architectures")
        return tuple(map(str, named)) if isinstance(named, list) else ()

    def label(self, argument: str) -> str:
        """How messages name an argument that is set: its name and origin."""
        return f"{argument} ({self.origins.get(argument, DEFAULT_ORIGIN)})"


class RulePhase(Enum):
    """What is known when a rule runs."""

    WRITTEN = "what was written"
    DEFAULTS = "all arguments, those included that LMI always passes"
    PLACED = "the parallel sizes"
    CHECKPOINT = "the model's config.json, which is empty until it can be read"


# A rule of the translation.
Rule = Callable[[ArgumentDraft], None]
# A note of `explain` on a setting (empty for none), and settings that it shows besides.
ExplainedNote = Callable[[Setting], str]
ExplainedRows = Callable[[Settings], Iterable[Setting]]
