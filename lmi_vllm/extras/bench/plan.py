"""What a load run is told to do, and what becomes of each of its requests."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

_TEXT: Final = (
    "the a of to and in that it was for on with as his they be at one have this from had hot word "
    "but what some we can out other were all there when up use your how said an each she"
)
WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A length, or the bounds between which one is drawn, both included."""

    low: int
    high: int

    def draw(self, dice: random.Random) -> int:
        """Return one of them, all alike."""
        return dice.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A run: `concurrency` requests at once, or `rate` a second (Poisson) whatever comes of them.

    With a rate, `concurrency` 0 is without bound. A run ends after `number` requests, or `seconds`.
    """

    concurrency: int = 8
    rate: float = 0.0
    number: int | None = 100
    seconds: float | None = None
    prompt_words: LengthRange = LengthRange(32, 32)
    output_tokens: LengthRange = LengthRange(64, 64)
    prompts: tuple[str, ...] = ()
    adapters: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    is_streaming: bool = True
    ignores_eos: bool = False
    temperature: float | None = None  # None leaves it to the server
    timeout_seconds: float = 240.0
    seed: int = 0

    def requests(self) -> "Requests":
        """Return what draws the requests; the same for the same seed."""
        return Requests(self, random.Random(self.seed))


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: `adapter` None is the base model."""

    prompt: str
    output_tokens: int
    adapter: str | None = None


@dataclass(slots=True)
class Requests:
    """Draws requests."""

    plan: LoadPlan
    dice: random.Random

    def next(self) -> LoadRequest:
        """Return another one."""
        plan, dice = self.plan, self.dice
        if plan.prompts:
            prompt = dice.choice(plan.prompts)
        else:
            prompt = " ".join(dice.choices(WORDS, k=plan.prompt_words.draw(dice)))
        adapter = None
        if plan.adapters:
            (adapter,) = dice.choices([*plan.adapters], weights=[*plan.adapters.values()])
        tokens = plan.output_tokens.draw(dice)
        return LoadRequest(prompt, tokens, None if adapter == "base" else adapter)

    def pause(self) -> float:
        """Return the seconds until the next arrival."""
        return self.dice.expovariate(self.plan.rate)


@dataclass(slots=True)
class RequestOutcome:
    """One request that has ended; times in seconds since the run began, gaps in seconds."""

    began: float
    ended: float = 0.0
    first_token: float | None = None
    last_token: float | None = None
    gaps: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    adapter: str | None = None
    error: str | None = None  # its kind
    example: str = ""  # what was said

    @property
    def is_good(self) -> bool:
        """Whether the answer was whole."""
        return self.error is None

    def add_tokens(self, count: int, now: float) -> None:
        """Note tokens that have just come."""
        if self.first_token is None:
            self.first_token = now
        elif self.last_token is not None:
            self.gaps.append(now - self.last_token)
        self.last_token = now
        self.output_tokens += count

    def fail(self, kind: str, example: str = "") -> None:
        """Note why it is no answer; the first reason counts."""
        if self.error is None:
            self.error, self.example = kind, " ".join(example.split())[:300]
