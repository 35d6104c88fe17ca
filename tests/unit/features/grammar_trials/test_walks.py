"""Which grammars are refused: too dear by the cost of each token of a try, or without any text."""

from typing import Any

import pytest

from lmi_vllm.features.grammar_trials.walks import (
    MEAN_SECONDS,
    STEP_SECONDS,
    TriedGrammar,
    check_costs,
    walk,
)

STEPS = 512


def tried(speed: float, power: float, seconds: float) -> tuple[list[float], bool]:
    """Return the costs of a try on a machine of that speed, and whether it ended in `seconds`."""
    costs: list[float] = []
    for step in range(1, STEPS + 1):
        costs.append(1e-6 * (1 + step**power) / speed)
        if sum(costs) > seconds or costs[-1] > STEP_SECONDS:
            return costs, step == STEPS
    return costs, True


@pytest.mark.parametrize("speed", [0.2, 0.5, 1, 2, 4])
def test_cost_that_grows_is_refused_on_machines_of_any_speed(speed: float) -> None:
    """Cubic growth, as of `(.*.*.*)*x`, is told long before its end."""
    for seconds in (0.1, 0.5, 1, 2):
        costs, is_whole = tried(speed, 3, seconds)
        with pytest.raises(ValueError, match="one token of an answer takes"):
            check_costs(costs, STEPS, is_whole=is_whole)


@pytest.mark.parametrize("speed", [0.2, 1, 4])
def test_constant_cost_passes_after_a_cut_trial(speed: float) -> None:
    """A large vocabulary may keep a try from its end; that alone is no fault."""
    check_costs([0.001 / speed] * 100, STEPS, is_whole=False)
    check_costs(tried(speed, 0, 1)[0], STEPS, is_whole=True)


def test_bounds() -> None:
    """One dear token, or many that are rather dear, are too much in a whole try as well."""
    check_costs([], STEPS, is_whole=True)
    check_costs([1e-4] * 99 + [STEP_SECONDS], STEPS, is_whole=True)
    check_costs([MEAN_SECONDS] * 99, STEPS, is_whole=True)
    for costs in ([1e-4] * 99 + [STEP_SECONDS * 1.01], [MEAN_SECONDS * 1.01] * 99):
        with pytest.raises(ValueError, match="too ambiguous"):
            check_costs(costs, STEPS, is_whole=True)


def test_few_tokens_give_no_growth_estimate() -> None:
    """The first tokens of an answer are the dearest of a short one: caches are cold."""
    check_costs([1e-6] * 14 + [0.04], STEPS, is_whole=False)


def test_grammar_is_not_refused_when_the_cpu_clock_stalls() -> None:
    """Processor time may be counted in coarse ticks, and a token cost nothing."""
    check_costs([0.0] * 100, STEPS, is_whole=False)


class Scripted:
    """A grammar of two tokens, 0 the end and 1 a letter: which may come at each step."""

    def __init__(self, *steps: set[int]) -> None:
        self.steps, self.step = steps, 0

    def reset(self) -> None:
        """Begin again."""
        self.step = 0

    def is_terminated(self) -> bool:
        """Tell whether the script is at its end."""
        return self.step == len(self.steps)

    def fill_bitmask(self, bitmask: Any, row: int) -> None:
        """Write which tokens may come."""
        bitmask[row] = sum(1 << token for token in self.steps[self.step])

    def accept_tokens(self, _request: str, tokens: list[int]) -> bool:
        """Go on by one token."""
        self.step += 1
        return set(tokens) <= self.steps[self.step - 1]


def walk_script(*steps: set[int]) -> None:
    """Walk a grammar that allows these tokens at each step."""
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    bitmask = torch.full((1, 1), -1, dtype=torch.int32)
    walk(TriedGrammar(Scripted(*steps), bitmask, np.array([1, 1]), np.array([0])), STEPS)


def test_grammar_that_no_text_matches_is_refused() -> None:
    """Neither a first token nor the end may come: the engine would fail at each request."""
    with pytest.raises(ValueError, match="no text matches"):
        walk_script(set())


@pytest.mark.parametrize("steps", [[{0}], [{1}, {0}], [{0, 1}, {1}, {0}]])
def test_grammar_of_an_empty_or_short_text_passes(steps: list[set[int]]) -> None:
    """The empty text matches where only the end may come."""
    walk_script(*steps)


def test_grammar_whose_every_walk_comes_to_a_dead_end_is_refused() -> None:
    """Behind the first letter neither more nor the end may come."""
    with pytest.raises(ValueError, match="after token 1 neither more nor the end may come"):
        walk_script({1}, set())


class Forked(Scripted):
    """The first letter of a vocabulary leads to the end, the second and longer one nowhere."""

    def accept_tokens(self, _request: str, tokens: list[int]) -> bool:
        """Choose a branch with the first token."""
        if not self.step:
            self.steps = (self.steps[0], {0} if tokens == [1] else set())
        return super().accept_tokens("", tokens)


def test_grammar_with_a_dead_end_beside_its_texts_passes() -> None:
    """It has texts: an answer that comes to the dead end says so."""
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    bitmask = torch.full((1, 1), -1, dtype=torch.int32)
    walk(TriedGrammar(Forked({1, 2}, {0}), bitmask, np.array([1, 1, 2]), np.array([0])), STEPS)
