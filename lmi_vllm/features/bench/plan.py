"""The plan of a load run, its random requests, and the outcome of each."""

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
    """The bounds of a length, both included; equal for a fixed one."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """Return a length drawn uniformly."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A run: `concurrency` requests at once, or an open loop of `rate` a second (Poisson).

    With a rate, `concurrency` bounds requests in flight; 0 is no bound. A run ends after `number`
    requests, or after `seconds`.
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
        """Return the generator of the requests; the same seed draws the same ones."""
        return Requests(self, random.Random(self.seed))


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: `adapter` None is the base model."""

    prompt: str
    output_tokens: int
    adapter: str | None = None


@dataclass(slots=True)
class Requests:
    """Draws random requests and the intervals between them."""

    plan: LoadPlan
    rng: random.Random

    def next(self) -> LoadRequest:
        """Return the next request."""
        plan, rng = self.plan, self.rng
        if plan.prompts:
            prompt = rng.choice(plan.prompts)
        else:
            prompt = " ".join(rng.choices(WORDS, k=plan.prompt_words.draw(rng)))
        adapter = None
        if plan.adapters:
            (adapter,) = rng.choices([*plan.adapters], weights=[*plan.adapters.values()])
        tokens = plan.output_tokens.draw(rng)
        return LoadRequest(prompt, tokens, None if adapter == "base" else adapter)

    def next_interval(self) -> float:
        """Return the seconds until the next arrival, exponentially distributed."""
        return self.rng.expovariate(self.plan.rate)


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
    error: str | None = None  # its kind, by which errors are counted
    example: str = ""  # the error's message, for the report

    @property
    def is_good(self) -> bool:
        """Whether the answer came to its end without an error."""
        return self.error is None

    def add_tokens(self, count: int, now: float) -> None:
        """Count tokens that came at `now`, in seconds since the run began."""
        if self.first_token is None:
            self.first_token = now
        elif self.last_token is not None:
            self.gaps.append(now - self.last_token)
        self.last_token = now
        self.output_tokens += count

    def fail(self, kind: str, example: str = "") -> None:
        """Record why the request failed; the first reason is kept."""
        if self.error is None:
            self.error, self.example = kind, " ".join(example.split())[:300]
