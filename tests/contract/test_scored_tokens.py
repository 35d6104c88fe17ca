"""Log probabilities of named tokens (`logprob_token_ids`) beside other requests, and drafts."""

import asyncio
from types import SimpleNamespace
from typing import Any, Final

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm.cpu.scored_tokens import (
    NOT_BESIDE_DRAFTS,
    fault_beside_drafts,
    for_its_own_rows,
)
from lmi_vllm.messages import GenerationJob
from tests.contract.conftest import LoopThread, collect

pytestmark = pytest.mark.vllm
torch = pytest.importorskip("torch")
NAMED: Final = [3, 4]
TOP: Final = 3
LOGITS: Final = [[0.0, 5.0, 1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 4.0, 2.0, 3.0, 0.0]]


@pytest.fixture
def metadata() -> Any:
    """Return what vLLM's sampler knows of two greedy requests; the first names tokens."""
    reason = "needs vLLM: make setup installs it"
    module = pytest.importorskip("vllm.v1.sample.metadata", reason=reason)
    processors = pytest.importorskip("vllm.v1.sample.logits_processor").LogitsProcessors()
    given = {"all_greedy": True, "no_penalties": True, "max_num_logprobs": TOP}
    names = module.SamplingMetadata.__dataclass_fields__
    fields: dict[str, Any] = dict.fromkeys(names) | {"all_random": False} | given
    fields |= {"bad_words_token_ids": {}, "output_token_ids": [[], []], "generators": {}}
    fields |= {"logitsprocs": processors, "logprob_token_ids": {0: NAMED}}
    return module.SamplingMetadata(**fields)


def columns(forward: Any, metadata: Any) -> list[list[int]]:
    """Return the tokens of each request whose log probabilities a sampler gives."""
    sampler = pytest.importorskip("vllm.v1.sample.sampler").Sampler()
    output = forward(sampler, torch.tensor(LOGITS), metadata)
    assert "gather_logprobs" not in vars(sampler)
    tensors = output.logprobs_tensors
    probabilities = torch.tensor(LOGITS).log_softmax(-1)
    for row, (tokens, values) in enumerate(
        zip(tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist(), strict=True)
    ):
        for token, value in zip(tokens, values, strict=True):
            if value != -float("inf"):
                assert value == pytest.approx(probabilities[row, token].item())
    return [
        [token for token, value in zip(*row, strict=True) if value != -float("inf")]
        for row in zip(tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist(), strict=True)
    ]


def test_plain_vllm_gives_a_batch_the_columns_of_one_request(metadata: Any) -> None:
    """The second request has lost its most probable tokens; ours keeps both kinds apart."""
    plain = pytest.importorskip("vllm.v1.sample.sampler").Sampler.forward
    plain = getattr(plain, "__wrapped__", plain)
    assert columns(plain, metadata) == [[1, *NAMED], [0]]
    ours = for_its_own_rows(plain)
    assert columns(ours, metadata) == [[1, *NAMED], [0, 0, 2, 4]]


@pytest.mark.parametrize("most", [1, 5])
def test_each_request_has_its_own_columns(metadata: Any, most: int) -> None:
    """Also where others ask for fewer or more tokens, and where no request names a token."""
    plain = pytest.importorskip("vllm.v1.sample.sampler").Sampler.forward
    ours = for_its_own_rows(getattr(plain, "__wrapped__", plain))
    metadata.max_num_logprobs = most
    first, second = columns(ours, metadata)
    assert first == [1, *NAMED]
    assert second == [0, 0, 2, 4, 3, 1][: most + 1]
    metadata.logprob_token_ids = None
    assert columns(ours, metadata) == [[1, 1, 5, 4, 3, 2][: most + 1], second]


def test_scores_leave_the_log_probabilities_of_others_alone(
    run: LoopThread, vllm_engine: Engine
) -> None:
    """On the engine: one request names tokens, again and again, while another is answered."""
    usual = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    wanted = GenerationJob(
        "others", "The moon is", {**usual, "logprobs": TOP}, needs_token_texts=True
    )
    naming = {**usual, "logprobs": len(NAMED), "logprob_token_ids": NAMED}
    scoring = GenerationJob("scores", "The river", naming, needs_token_texts=True)

    async def both() -> Any:
        answers = await asyncio.gather(collect(vllm_engine, wanted), collect(vllm_engine, scoring))
        return [shown(chunks) for chunks in answers]

    def shown(chunks: Any) -> list[Any]:
        return [[one.id for one in token.top] for chunk in chunks for token in chunk.tokens]

    alone = shown(run(collect(vllm_engine, wanted)))
    others, scored = run(both())
    assert others == alone
    assert {tops[-1] for tops in scored} == {NAMED[0]}


@pytest.mark.parametrize(
    ("drafts", "is_second", "is_refused"),
    [(object(), False, True), (object(), True, False), (None, False, False)],
)
def test_named_tokens_are_refused_beside_drafts(
    *, drafts: object, is_second: bool, is_refused: bool
) -> None:
    """By vLLM's first runner: the engine would end."""
    config = SimpleNamespace(speculative_config=drafts, use_v2_model_runner=is_second)
    assert not fault_beside_drafts(SimpleNamespace(logprob_token_ids=None), config)
    assert not fault_beside_drafts(SimpleNamespace(task="embed"), config)
    found = fault_beside_drafts(SimpleNamespace(logprob_token_ids=NAMED), config)
    assert found == (NOT_BESIDE_DRAFTS if is_refused else "")
