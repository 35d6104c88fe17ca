"""Log probabilities that are decoded late are those that vLLM decodes."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lmi_vllm.features.token_lane.logprobs import (
    LazyDecoder,
    LazyLogprobs,
    has_known_arrays,
    sampled_logprobs,
)

pytestmark = pytest.mark.vllm
# Tokens of a step, and how many candidates each has.
SHAPES: Final = {"one": (1, 0), "candidates": (1, 3), "draft": (3, 0), "draft's candidates": (3, 2)}


def lists(tokens: int, candidates: int, kind: Any = np.float32) -> LogprobsLists:
    """Return log probabilities as the sampler makes them."""
    numbers = 1 + np.arange(tokens * (candidates + 1)).reshape(tokens, candidates + 1)
    return LogprobsLists(
        numbers.astype(np.int32), (-numbers / 7).astype(kind), np.ones(tokens, np.int64)
    )


def messages(logprobs: LogprobsLists | None, tokens: int = 1) -> Sequence[Any]:
    """Return the frames of a step with one output."""
    output = EngineCoreOutput("request", list(range(tokens)), new_logprobs=logprobs)
    return [bytes(frame) for frame in MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))]


def decoded(frames: Sequence[Any]) -> tuple[EngineCoreOutput, EngineCoreOutput]:
    """Return the output as vLLM reads it, and as the lane does."""
    theirs, ours = MsgpackDecoder(EngineCoreOutputs), MsgpackDecoder(EngineCoreOutputs)
    ours.decoder = LazyDecoder(ours)
    return theirs.decode(frames).outputs[0], ours.decode(frames).outputs[0]


def same(one: LogprobsLists, other: Any) -> bool:
    """Whether both have the same arrays."""
    return all(
        (first is None and second is None)
        or (np.array_equal(first, second) and first.dtype == second.dtype)
        for first, second in zip(one, tuple(other), strict=True)
    )


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_late_arrays_are_those_of_the_message(name: str, kind: Any) -> None:
    """Unpacked, indexed, sliced, and the sampled tokens' numbers alone."""
    tokens, candidates = SHAPES[name]
    theirs, ours = decoded(messages(lists(tokens, candidates, kind), tokens))
    found = ours.new_logprobs
    assert has_known_arrays()
    assert type(found) is LazyLogprobs
    assert same(theirs.new_logprobs, found)
    assert np.array_equal(found[1], theirs.new_logprobs[1])
    assert same(theirs.new_logprobs.slice_request(0, 1), found.slice_request(0, 1))
    assert sampled_logprobs(found) == sampled_logprobs(theirs.new_logprobs)


def test_arrays_in_frames_of_their_own_are_vllm_s() -> None:
    """A message keeps them only while it is decoded."""
    frames = messages(lists(2, 100), 2)
    theirs, ours = decoded(frames)
    assert len(frames) > 1
    assert type(ours.new_logprobs) is LogprobsLists
    assert same(theirs.new_logprobs, ours.new_logprobs)


def test_outputs_without_log_probabilities_are_the_same() -> None:
    """Every field has the value that vLLM reads."""
    theirs, ours = decoded(messages(None))
    fields = EngineCoreOutput.__struct_fields__
    assert [getattr(ours, name) for name in fields] == [getattr(theirs, name) for name in fields]
