"""A sample of `make matrix`: adapters, target by target, answer as the weights merged by us do.

Families that vLLM alone answers wrongly for, or refuses: an attention in one tensor (Baichuan,
GPT-BigCode), and layers that an adapter's numbers do not fit (DeciLM), which is refused by name.
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from integration.matrix.adapters import run
from integration.matrix.checkpoints import ARCHITECTURES, Architecture

pytestmark = pytest.mark.vllm
# Architecture: what works beside others, and what is refused by which name.
SAMPLE = {
    "gpt_bigcode": ({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}, {"wte": "wte"}),
    "baichuan": ({"self_attn.W_pack", "self_attn.o_proj", "mlp.up_proj", "lm_head"}, {}),
    "decilm": (
        {"self_attn.q_proj", "mlp.down_proj"},
        {"self_attn.k_proj": "layers.0.repeated_heads.k_proj"},
    ),
}
ROWS = [row for row in ARCHITECTURES if row.name in SAMPLE]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_adapters_answer_as_merged_weights(row: Architecture, tmp_path: Path) -> None:
    """Each changes the answer, to Transformers' with B x A added; alone and all together."""
    works, refused = SAMPLE[row.name]
    outcome = run(row, tmp_path)
    assert (outcome.error, outcome.wrong) == ("", {})
    assert works <= set(outcome.works)
    for target, name in refused.items():
        assert name in outcome.refused[target]
