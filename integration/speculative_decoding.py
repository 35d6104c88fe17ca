"""Drafters of each kind on the real engine: their tokens are accepted, and no answer changes.

The drafters are made for the embedded model (tests/support/draft_models.py) and named by LMI's own
options. N-gram drafting: engine_features.py.
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from integration.conftest import RunningServer, running_server
from integration.engine_features import check_sampled_answers, counter, tokens
from integration.plain_model import plain_model
from tests.support.draft_models import DRAFTERS, MEDUSA_HEADS, STORY

pytestmark = pytest.mark.vllm
LENGTH = {"draft_model": 4, "eagle": 2, "eagle3": 2, "medusa": MEDUSA_HEADS}
# A copy of the model is right each time; what a head with one fitted matrix gets right varies.
LEAST_ACCEPTED = {"draft_model": 0.99, "eagle": 0.1, "eagle3": 0.1, "medusa": 0.1}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_are_accepted_and_answers_stay(
    kind: str, tmp_path: Path, demo_server: RunningServer
) -> None:
    """The greedy tokens of the server without a drafter, in fewer steps; sampled text is right."""
    drafter = DRAFTERS[kind](tmp_path / f"{kind.replace('_', '')}-head")
    options = {
        "speculative_draft_model": str(drafter),
        "speculative_length": str(LENGTH[kind]),
        "draft_model_tp_size": "1",
    }
    model = plain_model(tmp_path / "model", **options)
    with running_server(tmp_path, "--model", str(model)) as server:
        url = server.url
        assert tokens(url, STORY, 200) == tokens(demo_server.url, STORY, 200)
        check_sampled_answers(url)
        drafted = counter(url, "vllm:spec_decode_num_draft_tokens_total")
        accepted = counter(url, "vllm:spec_decode_num_accepted_tokens_total")
        print(kind, counter(url, "vllm:spec_decode_num_drafts_total"), drafted, accepted)
        assert counter(url, "vllm:spec_decode_num_drafts_total") > 0
        assert accepted >= LEAST_ACCEPTED[kind] * drafted > 0
