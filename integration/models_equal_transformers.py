"""A sample of `make matrix`: vLLM's own class, its Transformers backend, mappings of ours.

Every answer has the token ids of Transformers' own greedy generation for the same checkpoint.
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from integration.matrix.checkpoints import ARCHITECTURES, Architecture
from integration.matrix.page import how
from integration.matrix.run import run

pytestmark = pytest.mark.vllm
SAMPLE = {
    "starcoder2": "Transformers backend (`TransformersForCausalLM`)",
    "internlm": "mapping: `InternLMForCausalLM` is served as `LlamaForCausalLM`",
    "qwen": "mapping: `QWenLMHeadModel` is served as `LmiQwenForCausalLM`",
    "deepseek": "vLLM's own class (`DeepseekV3ForCausalLM`)",
}
ROWS = [row for row in ARCHITECTURES if row.name in SAMPLE]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_model_answers_what_transformers_says(row: Architecture, tmp_path: Path) -> None:
    """LMI and chat payloads, streamed and not; four times the same twelve tokens."""
    outcome = run(row, tmp_path)
    assert outcome.error == ""
    assert outcome.tokens >= 40
    assert how({"mapping": outcome.mapping, "served_as": outcome.served_as}) == SAMPLE[row.name]
