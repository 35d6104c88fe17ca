"""Texts by our table are those of the tokenizers library's stream, whatever the tokens are."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm.decoding import NO_PIECES, Pieces, tables_for
from lmi_vllm.engine.vllm.output import TableDetokenizer, with_table
from lmi_vllm.messages import GenerationJob
from tests.contract.conftest import LoopThread

pytestmark = pytest.mark.vllm
WHOLE: Final = (
    "the",
    " of",
    "é",
    "ü",
    "中文",
    "🙂",
    "🙂🙂",
    "\ufffd",
    "a\ufffd",
    "\n",
    " ",
    "\u2028",
    "क्",
)
# Added tokens are written as they are; the last ones look like bytes, or partly so.
ADDED: Final = ("<|end|>", "<tool call>", "naïve", "é", "中", "\ufffd", "Ġ")


def number(token: str) -> int:
    """Return a token's number."""
    found: int = TOKENIZER.token_to_id(token)
    return found


def written(text: str) -> str:
    """Return a token's text in the byte level's letters."""
    return "".join(
        piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        .pre_tokenize_str(text)
    )  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with all single bytes, parts of characters, words and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = [a + b for text in WHOLE for a, b in pairwise(written(text))]
    vocabulary = dict.fromkeys([*alphabet, *parts, *(written(text) for text in WHOLE)])
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(ADDED))
    tokenizer.add_special_tokens(["<s>", "<special é>", AddedToken("<ñ>", special=True)])
    return tokenizer


TOKENIZER: Final = byte_tokenizer()
TABLES: Final = {skips: Pieces(TOKENIZER, skip_special_tokens=skips) for skips in (False, True)}


def detokenizer(prompt: Sequence[int], **sampling: Any) -> FastIncrementalDetokenizer:
    """Return vLLM's detokenizer of a new sequence."""
    params = SamplingParams(**sampling)
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=list(prompt), mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip
    return FastIncrementalDetokenizer(PreTrainedTokenizerFast(tokenizer_object=TOKENIZER), request)


def said(of: FastIncrementalDetokenizer, steps: Sequence[Sequence[int]]) -> list[tuple[Any, ...]]:
    """Return what a detokenizer says step by step, up to a stop string."""
    found: list[tuple[Any, ...]] = []
    for step in steps:
        stopped = of.update(list(step), stop_terminated=False)
        found.append((stopped, of.get_next_output_text(stopped is not None, delta=True)))
        if stopped is not None:
            break
    return [*found, (of.output_text, list(of.output_token_ids))]


def random_steps(chance: random.Random, size: int) -> list[list[int]]:
    """Return steps of mostly one token; bytes of real characters among any tokens at all."""
    tokens: list[int] = []
    while len(tokens) < size:
        if chance.random() < 0.4:
            text = chance.choice(WHOLE)
            tokens += [number(letter) for letter in written(text)]
        else:
            # Beyond the vocabulary, too: a model may have more rows than its tokenizer has tokens.
            tokens.append(chance.randrange(TOKENIZER.get_vocab_size() + 3))
    steps = []
    while tokens:
        count = 1 if chance.random() < 0.9 else chance.randint(1, 4)
        steps.append(tokens[:count])
        tokens = tokens[count:]
    return steps


SAMPLINGS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "special tokens": {"skip_special_tokens": False},
    "no spaces between": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "stop string": {"stop": ["中文é", "of<tool"]},
    "stop string kept": {"stop": ["🙂the"], "include_stop_str_in_output": True, "min_tokens": 9},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_texts_are_those_of_the_stream(sampling: dict[str, Any]) -> None:
    """Hundreds of sequences of any tokens, after prompts that end anywhere, cut anywhere."""
    chance = random.Random(11)
    taken = 0
    for _ in range(400):
        prompt = [token for step in random_steps(chance, chance.randrange(12)) for token in step]
        steps = random_steps(chance, 60)
        ours = with_table(detokenizer(prompt, **sampling), prompt, TABLES)
        taken += type(ours) is TableDetokenizer
        assert said(ours, steps) == said(detokenizer(prompt, **sampling), steps)
    if sampling.get("spaces_between_special_tokens", True):
        assert taken > 200
    else:
        assert not taken


@pytest.mark.parametrize("skips", [False, True])
def test_each_token_after_each_beginning(skips: bool) -> None:
    """Every token there is, after nothing, a word, half a character and a special token."""
    half = number(written("中文")[0])
    starts: list[list[int]] = [
        [], [number("the")], [half], [number("<s>")],
        [number("<s>"), half],
    ]  # fmt: skip
    word = number("the")
    for start in starts:
        for token in range(TOKENIZER.get_vocab_size()):
            ours = with_table(detokenizer(start, skip_special_tokens=skips), start, TABLES)
            theirs = detokenizer(start, skip_special_tokens=skips)
            steps = [[token], [half], [token], [word], [word]]
            assert said(ours, steps) == said(theirs, steps), (start, token)


def test_a_token_with_a_text_of_its_own_is_left_to_vllm() -> None:
    """From the first token on that the table does not know, vLLM's stream goes on."""
    pieces = Pieces(TOKENIZER, skip_special_tokens=True)
    odd, word = number("naïve"), number("the")
    half = number(written("é")[0])
    pieces[odd] = None
    steps = [[word], [half], [odd], [word], [half]]
    ours = with_table(detokenizer([word]), [word], {True: pieces})
    assert said(ours, steps) == said(detokenizer([word]), steps)
    assert isinstance(ours, TableDetokenizer)
    assert ours.pieces is NO_PIECES


@pytest.mark.parametrize("token", [-1, 2**40])
def test_a_number_that_is_no_token_s_adds_nothing(token: int) -> None:
    """As with vLLM, which logs it."""
    ours = with_table(detokenizer([]), [], TABLES)
    word = number("the")
    steps = [[word], [token], [word]]
    assert said(ours, steps) == said(detokenizer([]), steps)
    assert [text for _, text in said(detokenizer([]), steps)[:-1]] == ["the", "", "the"]


def test_other_decoders_are_left_alone() -> None:
    """Llama 2's and T5's decoders look at neighbours: spaces and byte tokens."""
    for decoder in (decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel()]), None):
        tokenizer = byte_tokenizer()
        if decoder is not None:
            tokenizer.decoder = decoder
        tables = tables_for(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
        assert (tables is not None) == (decoder is None)


async def watched(engine: Any, job: GenerationJob) -> tuple[set[type], str, list[int]]:
    """Return the kinds of detokenizers that a job met, its text and its tokens."""
    kinds, text, tokens = set(), "", []
    async for chunk in engine.generate(job):
        states = engine._llm.output_processor.request_states.values()
        kinds |= {type(state.detokenizer) for state in states}
        text += chunk.text
        tokens += [token.id for token in chunk.tokens]
    return kinds, text, tokens


def test_the_engine_decodes_by_the_table(run: LoopThread, vllm_engine: Engine) -> None:
    """On the real engine, too; the text is the tokenizer's."""
    sampling = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    job = GenerationJob("table", "Once upon a time", sampling, is_streaming=True)
    kinds, text, tokens = run(watched(vllm_engine, job))
    assert kinds == {TableDetokenizer}
    tokenizer: Any = vllm_engine.tokenizer
    assert len(tokens) == 12
    assert text == tokenizer.decode(tokens)
