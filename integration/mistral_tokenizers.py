"""Mistral's tokenizers and its own layout: SentencePiece v3 and Tekken, with no option set.

Prompts are what mistral_common encodes, answers the tokens that Transformers gives for them; the
weights lie as Transformers writes them, or as Mistral does (params.json, consolidated.safetensors).
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from integration.matrix.checkpoints import ARCHITECTURES, Architecture
from integration.matrix.run import run

pytestmark = pytest.mark.vllm
ROWS = [row for row in ARCHITECTURES if row.tokenizer]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_mistral_tokenizer_is_asked_in_every_way(row: Architecture, tmp_path: Path) -> None:
    """LMI and chat payloads, streamed and not."""
    outcome = run(row, tmp_path)
    assert outcome.error == ""
    assert outcome.tokens >= 40
    assert outcome.served_as == "MistralForCausalLM"


def test_both_tokenizers_are_here_in_both_layouts() -> None:
    """A row that is taken out of the matrix is missed."""
    assert {(row.tokenizer, row.renamed is None) for row in ROWS} == {
        (tokenizer, is_theirs) for tokenizer in ("v3", "tekken") for is_theirs in (True, False)
    }
