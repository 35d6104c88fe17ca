"""Tokenizer code in a model's folder, written for Transformers 4, and the trial before a start."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

import sentencepiece
from transformers import AutoTokenizer
from vllm.tokenizers import get_tokenizer
from vllm.tokenizers.detokenizer_utils import (
    convert_ids_list_to_tokens,
    convert_prompt_ids_to_tokens,
)

from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.names import cached_tokenizer_from_config
from lmi_vllm.engine.vllm.tokenizer_trial import tried
from lmi_vllm.engine.vllm.workarounds import Scope
from lmi_vllm.errors import EngineStartError

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plain_tokenizers")]
TEXT = "The model reads words"
IMPORTS = "import sentencepiece\nfrom transformers import PreTrainedTokenizer\n"
# Ours; they call the base class and are called by it as the code of ChatGLM and Baichuan is.
PIECES = """
    vocab_files_names = {"vocab_file": "tokenizer.model"}
    model_input_names = ["input_ids", "attention_mask", "position_ids"]

    def load(self, vocab_file):
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=vocab_file)

    @property
    def vocab_size(self):
        return self.pieces.get_piece_size()

    def get_vocab(self):
        known = {self.convert_ids_to_tokens(place): place for place in range(self.vocab_size)}
        return {**known, **self.added_tokens_encoder}

    def _tokenize(self, text):
        return self.pieces.encode(text, out_type=str)

    def _convert_token_to_id(self, token):
        return self.pieces.piece_to_id(token)

    def _convert_id_to_token(self, index):
        return self.pieces.IdToPiece(index)

    def convert_tokens_to_string(self, tokens):
        return self.pieces.decode(tokens)

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return [self.pieces.bos_id(), *token_ids_0]
"""
OLD_PAD = f"""{IMPORTS}
class PaddingTokenizer(PreTrainedTokenizer):{PIECES}
    def __init__(self, vocab_file, padding_side="left", **kwargs):
        self.load(vocab_file)
        super().__init__(padding_side=padding_side, **kwargs)

    @property
    def eos_token(self):
        return "</s>"

    @property
    def eos_token_id(self):
        return self.pieces.eos_id()

    def _pad(self, encoded_inputs, max_length=None, padding_strategy=None,
             pad_to_multiple_of=None, return_attention_mask=None):
        assert self.padding_side == "left"
        encoded_inputs["position_ids"] = list(range(len(encoded_inputs["input_ids"])))
        return encoded_inputs
"""
BASE_FIRST = f"""{IMPORTS}
class LateTokenizer(PreTrainedTokenizer):{PIECES}
    def __init__(self, vocab_file, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **kwargs):
        super().__init__(bos_token=bos_token, eos_token=eos_token, unk_token=unk_token, **kwargs)
        self.load(vocab_file)
"""
CONFIGURATION = """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "internlm2"
"""
PUBLISHED = {
    "an old _pad": ("PaddingTokenizer", OLD_PAD, "_pad() got an unexpected keyword argument"),
    "the base class first": ("LateTokenizer", BASE_FIRST, "'property' object cannot be"),
}


@pytest.fixture
def applied(plain_tokenizers: None) -> Iterator[None]:
    """As in a server: from before a tokenizer is loaded."""
    with workarounds.apply(Scope.TOKENIZERS):
        yield


@pytest.fixture(scope="session")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece file that puts a blank before the first word, as Llama 2's."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "corpus").write_text(f"{TEXT}\nwords that the model reads\n" * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus"), model_prefix=str(folder / "tokenizer"), vocab_size=320,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return folder / "tokenizer.model"


def ids_of(pieces: Path, text: str = TEXT) -> list[int]:
    """What the SentencePiece file itself says."""
    found: list[int] = sentencepiece.SentencePieceProcessor(model_file=str(pieces)).encode(text)
    return found


def published(folder: Path, pieces: Path, kind: str, code: str, **config: Any) -> str:
    """Write a folder whose tokenizer is the class `kind` of `code`; return its path."""
    os.link(pieces, folder / "tokenizer.model")
    (folder / "tokenization_own.py").write_text(code, encoding="utf-8")
    auto = {"AutoTokenizer": [f"tokenization_own.{kind}", None]}
    files = {
        "tokenizer_config.json": {"tokenizer_class": kind, "auto_map": auto, **config},
        "config.json": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def generic(folder: Path, pieces: Path, **config: Any) -> str:
    """Write a folder of the kind for which vLLM takes the generic class; return its path."""
    path = published(folder, pieces, "InternLM2Tokenizer", "", bos_token="<s>", **config)
    own = {"model_type": "internlm2", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(own), encoding="utf-8")
    (folder / "configuration_own.py").write_text(CONFIGURATION, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_plain_transformers_calls_published_code_in_new_ways(
    tmp_path: Path, pieces: Path, name: str
) -> None:
    """Once it does not, the workaround may go."""
    kind, code, said = PUBLISHED[name]
    path = published(tmp_path, pieces, kind, code)
    with pytest.raises(TypeError) as failed:
        AutoTokenizer.from_pretrained(path, trust_remote_code=True).encode(TEXT)
    assert said in str(failed.value)


# As that of Qwen 1: it decodes past `convert_ids_to_tokens`.
OWN_DECODE = f"""{BASE_FIRST}
    def _decode(self, token_ids, skip_special_tokens=False, **kwargs):
        return self.pieces.decode(list(token_ids))
"""
BEHIND = 5000  # an id that a model may have, and its tokenizer has not


def test_plain_transformers_fails_on_ids_behind_those_of_the_tokenizer(
    tmp_path: Path, pieces: Path
) -> None:
    """Once it does not, the workaround may go."""
    code = BASE_FIRST.replace("self.load(vocab_file)", "").replace(
        "        super()", "        self.load(vocab_file)\n        super()"
    )
    path = published(tmp_path, pieces, "LateTokenizer", code)
    found = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    with pytest.raises(IndexError):
        found.decode([BEHIND])


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("code", [BASE_FIRST, OWN_DECODE], ids=["base", "own"])
def test_id_behind_those_of_the_tokenizer_is_an_empty_text(
    tmp_path: Path, pieces: Path, code: str
) -> None:
    """Alone, among others, as a token, and in vLLM's functions for answers."""
    path = published(tmp_path, pieces, "LateTokenizer", code)
    found: Any = get_tokenizer(path, trust_remote_code=True)
    ids = ids_of(pieces)
    assert found.decode([BEHIND]) == ""
    assert found.decode([*ids, BEHIND]) == found.decode(ids) == TEXT
    assert found.convert_ids_to_tokens(BEHIND) == ""
    assert found.convert_ids_to_tokens([1, BEHIND, 2], skip_special_tokens=True) == [""]
    assert convert_ids_list_to_tokens(found, [BEHIND, ids[0]])[0] == ""
    assert convert_prompt_ids_to_tokens(found, [BEHIND, BEHIND])[0] == ["", ""]


def test_plain_transformers_leaves_out_the_first_blank(tmp_path: Path, pieces: Path) -> None:
    """Nor is there a BOS; once both are there, the workaround may go."""
    found = get_tokenizer(generic(tmp_path, pieces), trust_remote_code=True)
    ids = found.encode(TEXT)
    assert found.convert_ids_to_tokens(ids[:1]) == ["The"]
    assert ids != ids_of(pieces)


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_code_reads_and_writes_text(tmp_path: Path, pieces: Path, name: str) -> None:
    """With the ids of its own file, by vLLM's own loading, again and again."""
    kind, code, _ = PUBLISHED[name]
    path = published(tmp_path, pieces, kind, code)
    for _ in range(2):
        found = get_tokenizer(path, trust_remote_code=True)
        assert found.encode(TEXT) == [1, *ids_of(pieces)]
        assert found([TEXT, "words"]).input_ids == [
            [1, *ids_of(pieces)],
            [1, *ids_of(pieces, "words")],
        ]
        assert found.decode(ids_of(pieces)) == TEXT
        assert (found.eos_token, found.eos_token_id, found.vocab_size) == ("</s>", 2, len(found))


@pytest.mark.usefixtures("applied")
def test_special_tokens_of_late_code_are_those_of_its_vocabulary(
    tmp_path: Path, pieces: Path
) -> None:
    """They are not put behind it, and one that is new still is."""
    path = published(
        tmp_path, pieces, "LateTokenizer", BASE_FIRST, additional_special_tokens=["<new>"]
    )
    found = get_tokenizer(path, trust_remote_code=True)
    size = found.vocab_size
    assert found.convert_tokens_to_ids(["<unk>", "<s>", "</s>", "<new>"]) == [0, 1, 2, size]
    assert found.encode("reads<new>") == [1, *ids_of(pieces, "reads"), size]


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize(("config", "begin"), [({}, [1]), ({"add_bos_token": False}, [])])
def test_generic_tokenizer_has_the_ids_of_its_sentencepiece_file(
    tmp_path: Path, pieces: Path, config: dict[str, Any], begin: list[int]
) -> None:
    """The blank before the first word, and BOS as InternLM2's class has it."""
    found = get_tokenizer(generic(tmp_path, pieces, **config), trust_remote_code=True)
    assert found.encode(TEXT) == [*begin, *ids_of(pieces)]
    assert found.decode(ids_of(pieces)) == TEXT


def config_of(path: str, *, trusted: bool = True) -> Any:
    """What vLLM reads of a model's configuration for its tokenizer."""
    return SimpleNamespace(
        model=path, hf_config=None, tokenizer=path, runner_type="generate", tokenizer_mode="auto",
        tokenizer_revision=None, trust_remote_code=trusted, skip_tokenizer_init=False,
    )  # fmt: skip


def fault_of(path: str, *, trusted: bool = True) -> str:
    """The one line with which a start ends."""
    with pytest.raises(EngineStartError) as failed:
        tried(path, partial(cached_tokenizer_from_config, config_of(path, trusted=trusted)))
    assert "\n" not in failed.value.text
    assert path in failed.value.text
    return failed.value.text


@pytest.mark.usefixtures("applied")
def test_code_that_cannot_encode_ends_the_start_before_the_weights(
    tmp_path: Path, pieces: Path
) -> None:
    """It ended at the first token, after the weights, with the words of a library."""
    code = OLD_PAD.replace('encoded_inputs["position_ids"]', 'self.gone["position_ids"]')
    text = fault_of(published(tmp_path, pieces, "PaddingTokenizer", code))
    assert "tokenization_own.py" in text
    assert "option.tokenizer" in text


@pytest.mark.usefixtures("applied")
def test_code_that_may_not_run_is_named_with_the_option_that_lets_it(
    tmp_path: Path, pieces: Path
) -> None:
    """A plain sentence."""
    path = published(tmp_path, pieces, "LateTokenizer", BASE_FIRST)
    assert "option.trust_remote_code=true" in fault_of(path, trusted=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", ""), ("tokenizer.json", '{"version": "1.0"'), ("nothing", "")],
)
def test_files_that_are_no_tokenizer_are_named(tmp_path: Path, name: str, content: str) -> None:
    """Missing, empty and cut."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', encoding="utf-8"
    )
    assert "tokenizer.json" in fault_of(str(tmp_path))


def test_model_without_a_tokenizer_is_not_tried() -> None:
    """`skip_tokenizer_init`: tokens in, tokens out."""
    config = SimpleNamespace(skip_tokenizer_init=True, tokenizer="/nowhere")
    assert tried("/nowhere", partial(cached_tokenizer_from_config, config)) is None
