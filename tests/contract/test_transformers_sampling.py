"""How the Transformers engine chooses tokens, on logits that can be followed by hand."""

from typing import Any

import pytest

pytestmark = pytest.mark.vllm
THREE = [3.0, 2.5, 1.8, -1.0]


def chosen(logits: list[float], count: int, seed: int = 1, **fields: Any) -> list[int]:
    """Return the tokens chosen from the same logits each time."""
    torch = pytest.importorskip("torch", reason="needs vLLM: make setup installs it")
    from transformers import LogitsProcessorList  # noqa: PLC0415 (slow)

    from lmi_vllm.features.seq2seq.sampling import (  # noqa: PLC0415 (imports torch)
        Sampling,
        TokenSampler,
    )

    generator = torch.Generator().manual_seed(seed)
    rules = LogitsProcessorList()
    words = fields.pop("words", ())
    ends = fields.pop("ends", ())
    chooser = TokenSampler(Sampling(**fields), rules, 0, ends, words, generator)
    return [chooser.choose(torch.tensor(logits)).token for _ in range(count)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, [0, 0, 0, 0], id="plain"),
        pytest.param({"frequency_penalty": 1.0}, [0, 1, 0, 2], id="frequency"),
        pytest.param({"presence_penalty": 1.0}, [0, 1, 0, 0], id="presence"),
        pytest.param({"repetition_penalty": 2.0}, [0, 1, 2, 0], id="repetition"),
        pytest.param({"logit_bias": {3: 5.0}}, [3, 3, 3, 3], id="bias"),
        pytest.param({"allowed_token_ids": (2, 3)}, [2, 2, 2, 2], id="allowed"),
        pytest.param({"words": [[0, 0]]}, [0, 1, 0, 1], id="bad word of two tokens"),
        pytest.param({"words": [[0]]}, [1, 1, 1, 1], id="bad word of one token"),
        pytest.param({"ends": (0,), "min_tokens": 2}, [1, 1, 0, 0], id="least"),
        pytest.param(
            {"stop_token_ids": (0,), "min_tokens": 2}, [1, 1, 0, 0], id="least before a stop token"
        ),
    ],
)
def test_greedy_takes_the_best_unmasked_token(fields: dict[str, Any], expected: list[int]) -> None:
    """Each field does what vLLM's sampler does with it, on the answer's own tokens."""
    assert chosen(THREE, 4, temperature=0.0, **fields) == expected


LOGS = [-0.6931, -1.2040, -1.8971, -2.9957]  # of 0.5, 0.3, 0.15, 0.05


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.79}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),
        ({"temperature": 0.05}, {0}),
        ({"top_p": 1e-300}, {0}),
        ({"min_p": 1.0, "top_k": 1, "top_p": 5e-324}, {0}),
        ({"temperature": 1e-5, "logit_bias": {2: 100.0}, "repetition_penalty": 1e-37}, {2}),
        ({"temperature": 1e300}, {0, 1, 2, 3}),
    ],
)
def test_sampling_uses_only_unmasked_tokens(fields: dict[str, Any], left: set[int]) -> None:
    """Of 400 draws every token that may come does, and no other."""
    assert set(chosen(LOGS, 400, **fields)) == left
