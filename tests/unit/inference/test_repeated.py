"""What many requests have in common is made once, and never mistaken for something else."""

import pytest

from lmi_vllm.inference.request.parameters import Repeated, plain_key
from lmi_vllm.messages import GenerationJob


@pytest.mark.parametrize("other", [1, 1.0, True, "1", None])
@pytest.mark.parametrize("one", [1, 1.0, True, "1", None])
def test_only_the_same_value_of_the_same_type_has_the_same_key(one: object, other: object) -> None:
    """Python's 1, 1.0 and True are equal, and a parameter's are not."""
    is_same = type(one) is type(other)
    assert (plain_key({"a": one}) == plain_key({"a": other})) is is_same
    one_job, other_job = (GenerationJob("a", "b", {"a": value}) for value in (one, other))
    assert (one_job.sampling_key == other_job.sampling_key) is is_same


def test_names_and_values_are_not_mixed_up() -> None:
    """The key is flat, and its length says how many names there are."""
    assert plain_key({"a": "b"}) != plain_key({"b": "a"})
    assert plain_key({"a": 1, "b": 2}) != plain_key({"a": 2, "b": 1})
    assert plain_key({}) == ()


@pytest.mark.parametrize("value", [["a"], {"a": 1}, ("a",), b"a", 1j], ids=repr)
def test_what_is_more_than_a_number_or_a_text_has_no_key(value: object) -> None:
    """It might be changed, or hold anything."""
    assert plain_key({"a": 1, "b": value}) is None
    assert GenerationJob("a", "b", {"a": 1, "b": value}).sampling_key is None


def test_jobs_differ_by_what_else_their_parameters_are_made_of() -> None:
    """A stream has other ones, and the model's defaults count for some."""
    keys = {
        GenerationJob("a", "b", {"n": 1}, is_streaming=a, apply_model_defaults=b).sampling_key
        for a in (False, True)
        for b in (False, True)
    }
    assert len(keys) == 4


def test_long_keys_are_not_kept() -> None:
    """Clients choose names and texts: they must not fill the memory."""
    repeated = Repeated[int]()
    for size in (Repeated.longest - 1, Repeated.longest):
        repeated.keep(("a", "b" * size), size)
    assert repeated.find(("a", "b" * (Repeated.longest - 1))) == Repeated.longest - 1
    assert repeated.find(("a", "b" * Repeated.longest)) is None


def test_number_of_kept_keys_is_bounded() -> None:
    """Clients may send another seed each time."""
    repeated = Repeated[int]()
    for number in range(3 * Repeated.most + 1):
        repeated.keep(("seed", number), number)
        assert repeated.find(("seed", number)) == number
    assert (
        sum(repeated.find(("seed", number)) is not None for number in range(3 * Repeated.most + 1))
        <= Repeated.most
    )
