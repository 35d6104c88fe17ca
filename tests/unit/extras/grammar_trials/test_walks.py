"""Which grammars are too dear, told from the cost of each token of a try."""

import pytest

from lmi_vllm.extras.grammar_trials.walks import MEAN_SECONDS, STEP_SECONDS, check_costs

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
