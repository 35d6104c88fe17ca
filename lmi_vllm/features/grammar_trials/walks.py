"""Whether a grammar is cheap enough to serve: walked as an engine would, each token with its cost.

Seconds depend on the machine, but growth does not. The costs of an ambiguous grammar grow with a
power of the answer's length (the square and more, seen with xgrammar 0.2.8). So a trial that was
cut is extrapolated by its own growth: a fast machine must not accept what a slow one refuses.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, NamedTuple

WALK_SECONDS: Final = 0.5  # per walk, for a harmless grammar over a large vocabulary
STEP_SECONDS: Final = 0.05  # processor time that one token may cost
MEAN_SECONDS: Final = 0.01  # that the tokens of an answer may cost on average
MIN_TOKENS: Final = 16  # from which growth can be told
_LEAST: Final = 1e-9  # seconds; a coarse clock may say 0, of which there is no power


class TriedGrammar(NamedTuple):
    """A compiled grammar in vLLM's form, and what it takes to walk it."""

    grammar: Any
    bitmask: Any  # of one row, for the tokens that may come next
    lengths: Any  # of the vocabulary's tokens
    ends: Any  # token ids


class Walk(NamedTuple):
    """What one walk found."""

    costs: list[float]  # processor seconds of each token
    is_whole: bool  # it was not cut
    is_dead: bool = False  # it ended where neither a token nor the end may come


def walk(tried: TriedGrammar, steps: int) -> None:
    """Ask for tokens as the engine would: what each costs may grow with the answer.

    Walks take the same token as long as they may (what a weak model does), the longest one (what
    costs most), and random ones.

    Raises:
        ValueError: no text matches, every walk came to a dead end, or one token cost too much, or
            would before the answer ends.
    """
    walks: list[Callable[[Any], Any]] = [
        _Persistent(),
        lambda ids: ids[tried.lengths[ids].argmax()],
    ]
    walks += [random.Random(seed).choice for seed in (1, 2)]
    lengths = []  # of those that came to a dead end
    for choose in walks:
        walked = _walk_once(tried, steps, choose)
        check_costs(walked.costs, steps, is_whole=walked.is_whole)
        if walked.is_dead:
            lengths.append(len(walked.costs))
    if len(lengths) == len(walks):
        raise ValueError(_dead(min(lengths), max(lengths)))


@dataclass(slots=True)
class _Persistent:
    """Chooses what it chose before, and otherwise anything."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    token: int = -1

    def __call__(self, allowed: Any) -> Any:
        if self.token not in allowed:
            self.token = self.chance.choice(allowed)
        return self.token


def _walk_once(tried: TriedGrammar, steps: int, choose: Callable[[Any], Any]) -> Walk:
    import numpy as np  # noqa: PLC0415 - it comes with vLLM

    grammar = tried.grammar
    grammar.reset()
    deadline = time.thread_time() + WALK_SECONDS
    costs: list[float] = []
    while len(costs) < steps and not grammar.is_terminated():
        if time.thread_time() > deadline or (costs and costs[-1] > STEP_SECONDS):
            return Walk(costs, is_whole=False)
        began = time.thread_time()
        grammar.fill_bitmask(tried.bitmask, 0)
        cost = time.thread_time() - began
        bits = np.unpackbits(tried.bitmask.numpy().view(np.uint8), bitorder="little")
        possible = np.flatnonzero(bits[: len(tried.lengths)])
        if not len(possible):  # the engine would fail here
            return Walk(costs, is_whole=True, is_dead=True)
        allowed = np.setdiff1d(possible, tried.ends, assume_unique=True)
        if not len(allowed):
            break
        token = int(choose(allowed))
        began = time.thread_time()
        if not grammar.accept_tokens("", [token]):
            break
        costs.append(cost + time.thread_time() - began)
    return Walk(costs, is_whole=True)


def check_costs(costs: Sequence[float], steps: int, *, is_whole: bool) -> None:
    """Judge the processor seconds of each token; a try that `is_whole` ended within `steps`.

    Raises:
        ValueError: they are too much, or would be before the answer ends.
    """
    if not costs:
        return
    most, mean = max(costs), fmean(costs)
    if most > STEP_SECONDS:
        raise ValueError(_too_slow(most))
    if mean > MEAN_SECONDS:
        raise ValueError(_too_slow(mean))
    if not is_whole and len(costs) >= MIN_TOKENS:
        foretold = _extrapolated(costs, steps)
        if foretold > STEP_SECONDS:
            raise ValueError(_too_slow(foretold))


def _extrapolated(costs: Sequence[float], steps: int) -> float:
    """Return what the last of `steps` tokens will cost, by the power with which costs grew."""
    quarter = len(costs) // 4
    early, late = (
        max(fmean(part), _LEAST) for part in (costs[quarter : 2 * quarter], costs[-quarter:])
    )
    # The middles of these quarters lie at 3/8 and 7/8 of what was tried.
    power = max(0.0, math.log(late / early) / math.log(7 / 3))
    return late * math.pow(steps / (len(costs) * 7 / 8), power)


def _too_slow(seconds: float) -> str:
    return (
        "it is too ambiguous or too deeply repeated: "
        f"one token of an answer takes {seconds:.2g} s and more"
    )


def _dead(least: int, most: int) -> str:
    if not most:
        return "no text matches it"
    token = f"{most}" if least == most else f"{least} to {most}"
    return f"it has dead ends: after token {token} neither more nor the end may come"
