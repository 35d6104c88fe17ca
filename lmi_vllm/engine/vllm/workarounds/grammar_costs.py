"""Whether a grammar is cheap enough to serve, from what each token of a try cost.

Seconds depend on the machine, growth does not. The costs of an ambiguous grammar grow with a power
of the answer's length (the square and more, seen with xgrammar 0.2.8), so a try that was cut is
carried on by its own growth: a fast machine must not let pass what a slow one refuses.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final

STEP_SECONDS: Final = 0.05  # processor time that one token may cost
MEAN_SECONDS: Final = 0.01  # that the tokens of an answer may cost on average
FEWEST_TOKENS: Final = 16  # from which growth can be told
_LEAST: Final = 1e-9  # seconds; a coarse clock may say 0, of which there is no power


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
    if not is_whole and len(costs) >= FEWEST_TOKENS:
        foretold = _foretell(costs, steps)
        if foretold > STEP_SECONDS:
            raise ValueError(_too_slow(foretold))


def _foretell(costs: Sequence[float], steps: int) -> float:
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
