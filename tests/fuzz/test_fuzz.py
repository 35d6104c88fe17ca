"""A bounded slice of the fuzz, for CI: mutated well-formed inputs and random bytes."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import TARGETS

EXAMPLES = {"payload": 3000, "headers": 1000, "properties": 1000, "rates": 1000}


@st.composite
def mutated(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Draw a seed with a few pieces replaced, removed, doubled or cut off."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(0, 16))
        piece = draw(st.one_of(st.binary(max_size=8), st.just(data[start : start + length] * 2)))
        data = data[:start] + piece + data[start + length :]
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_raise_only_lmi_errors(name: str) -> None:
    """Whatever the bytes: an answer, or an error that says what is wrong."""

    @settings(
        max_examples=EXAMPLES.get(name, 300),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.one_of(mutated(SEEDS[name]), st.binary(max_size=200)))
    @example(b"")
    def fuzz(data: bytes) -> None:
        TARGETS[name](data)

    fuzz()


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_taken(name: str) -> None:
    """The inputs that mutations start from, as they are."""
    for seed in SEEDS[name]:
        TARGETS[name](seed)
