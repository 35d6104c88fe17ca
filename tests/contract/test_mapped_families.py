"""Families that vLLM dropped, in the classes of ours that read them: Transformers' own tokens.

No server and one process: the matrix (`make matrix`) asks the same over HTTP, in minutes.
"""

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.interfaces import supports_lora

from lmi_vllm.features.legacy_models import MODEL_CLASSES
from lmi_vllm.features.legacy_models.architectures import LORA_SINCE, lacks_lora

pytestmark = pytest.mark.vllm
FAMILIES = {
    "baichuan": "LmiBaichuanForCausalLM",
    "baichuan_13b": "LmiBaichuanAlibiForCausalLM",
    "baichuan2": "LmiBaichuan2ForCausalLM",
    "baichuan2_13b": "LmiBaichuan2AlibiForCausalLM",
    "dbrx": "LmiDbrxForCausalLM",
    "dbrx_rope": "LmiDbrxForCausalLM",
    "decilm": "LmiDeciLMForCausalLM",
    "mllama": "LmiMllamaTextForCausalLM",
    "mpt": "LmiMptForCausalLM",
    "qwen": "LmiQwenForCausalLM",
}
# Mapped for adapters alone: integration/adapters_equal_merged_weights.py
WITH_ADAPTERS = {"LmiGPTBigCodeForCausalLM"}
# They make vectors and scores: tests/contract/test_pooling.py
ENCODERS = {"LmiDistilBertModel", "LmiDistilBertForSequenceClassification"}


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """What Transformers and vLLM say, by name."""
    done = subprocess.run(
        [sys.executable, "-m", "integration.matrix.in_process", *FAMILIES],
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(FAMILIES), done.stderr[-2000:]
    return {answer["name"]: answer for answer in found}


def test_every_own_model_class_is_covered() -> None:
    """A new one wants a row."""
    assert set(FAMILIES.values()) | WITH_ADAPTERS | ENCODERS == set(MODEL_CLASSES)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(name: str, answers: dict[str, dict[str, Any]]) -> None:
    """Twelve greedy ones."""
    answer = answers[name]
    assert "error" not in answer, answer["error"]
    assert answer["seen"] == answer["expected"]


@pytest.mark.parametrize("name", sorted(LORA_SINCE))
def test_class_that_is_refused_with_adapters_has_no_lora_layers(name: str) -> None:
    """Where a release gives it some, the refusal is to go."""
    ours = MODEL_CLASSES.get(name)
    module, _, own = (ours or "").partition(":")
    found = (
        getattr(importlib.import_module(module), own)
        if ours
        else ModelRegistry.models[name].load_model_cls()
    )
    assert supports_lora(found) is not lacks_lora(name)
