"""Tokenizers that name a class which splits text in another way than their tokenizer.json."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import GPT2Tokenizer, LlamaTokenizer
from vllm.tokenizers import get_tokenizer

from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.workarounds import Scope

pytestmark = pytest.mark.vllm
TEXT = "def f(n):\n    return n + 2024  # the naïve way, 日本語"
SAID = "splits text in another way than the file"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(autouse=True)
def applied() -> Iterator[None]:
    """As in a server: from before a tokenizer is loaded."""
    with workarounds.apply(Scope.TOKENIZERS):
        yield


def saved(
    folder: Path, kind: str, model_type: str = "llama", splitting: Any = BYTES, **config: Any
) -> Tokenizer:
    """Write a tokenizer that names the class `kind`, and return that of its file."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    is_bytes = splitting is not None
    if is_bytes:
        made.pre_tokenizer, made.decoder = splitting, decoders.ByteLevel()
    else:  # as in Llama 2
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made.decoder = decoders.Metaspace()
    letters = pre_tokenizers.ByteLevel.alphabet() if is_bytes else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=letters,
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([TEXT, "a 2024 20 24 240 model of the world"] * 9, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"tokenizer_class": kind, **ENDS, **config},
        "config.json": {"model_type": model_type, "architectures": ["LlamaForCausalLM"]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return made


def ids(tokenizer: Any) -> list[int]:
    """The ids of the text alone."""
    found: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
    return found


def test_plain_transformers_splits_text_by_the_class(tmp_path: Path) -> None:
    """Blanks are lost; once they are not, the workaround may go."""
    saved(tmp_path, "LlamaTokenizerFast")
    found = LlamaTokenizer.from_pretrained(str(tmp_path))
    assert " " not in found.decode(ids(found))


@pytest.mark.parametrize(
    ("kind", "model_type", "splitting"),
    [
        *(("LlamaTokenizerFast", name, BYTES) for name in ("llama", "qwen3", "kimi_k2", "phimoe")),
        ("LlamaTokenizer", "llama", BYTES),
        ("GPT2Tokenizer", "llama", DIGITS),
        ("GPT2TokenizerFast", "starcoder2", DIGITS),
        ("Qwen2Tokenizer", "qwen2", DIGITS),
    ],
)
def test_tokenizer_has_the_ids_of_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, model_type: str, splitting: Any
) -> None:
    """By vLLM's own loading, with BOS as the files say, and one line in the log."""
    read = saved(tmp_path, kind, model_type, splitting)
    found = get_tokenizer(str(tmp_path))
    expected = read.encode(TEXT, add_special_tokens=False).ids
    assert ids(found) == expected
    assert found.decode(expected) == TEXT
    assert found.encode(TEXT) == [found.bos_token_id, *expected]
    assert (found.eos_token, found.is_fast) == ("</s>", True)
    assert [SAID in line for line in caplog.messages].count(True) <= 1


def test_line_names_the_folder_and_the_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator can see why answers differ from those of Transformers."""
    saved(tmp_path, "LlamaTokenizerFast")
    get_tokenizer(str(tmp_path))
    (line,) = (line for line in caplog.messages if SAID in line)
    assert str(tmp_path) in line
    assert "LlamaTokenizer" in line


@pytest.mark.parametrize(
    ("kind", "splitting"), [("LlamaTokenizerFast", None), ("GPT2Tokenizer", BYTES)]
)
def test_class_that_fits_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, splitting: Any
) -> None:
    """Nothing is said, and what the class adds stays."""
    saved(tmp_path, kind, splitting=splitting)
    found = get_tokenizer(str(tmp_path))
    assert isinstance(found, LlamaTokenizer if splitting is None else GPT2Tokenizer)
    assert not [line for line in caplog.messages if SAID in line]


def test_end_token_of_the_class_is_kept(tmp_path: Path) -> None:
    """GPT-2's class has one where the files name none: answers end with it."""
    read = saved(tmp_path, "GPT2Tokenizer", "gpt2", DIGITS)
    read.add_special_tokens(["<|endoftext|>"])
    read.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    found = get_tokenizer(str(tmp_path))
    assert ids(found) == read.encode(TEXT, add_special_tokens=False).ids
    assert found.eos_token == "<|endoftext|>"


def test_processes_that_vllm_spawns_read_the_file_too(tmp_path: Path) -> None:
    """On a GPU the engine is spawned: its grammars are made of its own tokenizer."""
    read = saved(tmp_path, "LlamaTokenizerFast")
    code = (
        "import sys; from lmi_vllm.engine.vllm.processes import register_plugin\n"
        "register_plugin()\nfrom transformers import AutoTokenizer\n"
        "found = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "print(found.encode(sys.argv[2], add_special_tokens=False))"
    )
    environ = {**os.environ, "LMI_VLLM_SERVER_PID": str(os.getpid())}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), TEXT],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == read.encode(TEXT, add_special_tokens=False).ids
