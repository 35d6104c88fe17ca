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
from lmi_vllm.engine.vllm.workarounds.prompt_ends import begin_after
from lmi_vllm.features.token_lane.decoding import Pieces, TableText, tables_for
from lmi_vllm.messages import GenerationJob
from tests.contract.conftest import LoopThread, collect

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
    """Return vLLM's detokenizer of a new sequence, as the server uses it."""
    params = SamplingParams(**sampling)
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=list(prompt), mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    made = FastIncrementalDetokenizer(tokenizer, request)
    begin_after(made, prompt)
    return made


def said(of: FastIncrementalDetokenizer, steps: Sequence[Sequence[int]]) -> list[tuple[Any, ...]]:
    """Return what a detokenizer says step by step, up to a stop string."""
    found: list[tuple[Any, ...]] = []
    for step in steps:
        stopped = of.update(list(step), stop_terminated=False)
        found.append((stopped, of.get_next_output_text(stopped is not None, delta=True)))
        if stopped is not None:
            break
    return [*found, (of.output_text, list(of.output_token_ids))]


def said_in_turns(
    of: FastIncrementalDetokenizer, steps: Sequence[Sequence[int]], pieces: Pieces, chance: Any
) -> tuple[list[tuple[Any, ...]], int]:
    """Return what the table and vLLM's detokenizer say in turns, and how many steps were ours."""
    table, found, ours, taken = TableText(of, pieces), [], False, 0
    for step in steps:
        if ours and chance.random() < 0.2:
            table.write_back()
            ours = False
        ours = ours or (chance.random() < 0.8 and table.begin())
        text = read_step(table, list(step)) if ours else None
        if text is not None:
            taken += 1
            found.append((None, text))
            continue
        if ours:
            table.write_back()
            ours = False
        stopped = of.update(list(step), stop_terminated=False)
        found.append((stopped, of.get_next_output_text(stopped is not None, delta=True)))
        if stopped is not None:
            break
    if ours:
        table.write_back()
    return [*found, (of.output_text, list(of.output_token_ids))], taken


def read_step(table: TableText, ids: list[int]) -> str | None:
    """Return the text of a step as the lane reads it, which only notes most tokens."""
    if table.is_plain and len(ids) == 1 and type(text := table.pieces[ids[0]]) is str:
        table.ids += ids
        return text
    return table.read(ids)


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
    "stop string": {"stop": ["中文é", "of<tool"]},
    "stop string kept": {"stop": ["🙂the"], "include_stop_str_in_output": True, "min_tokens": 9},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_texts_are_those_of_the_stream(sampling: dict[str, Any]) -> None:
    """Hundreds of sequences of any tokens, cut anywhere, handed over and taken back anywhere."""
    chance = random.Random(11)
    pieces = TABLES[sampling.get("skip_special_tokens", True)]
    ours = 0
    for _ in range(600):
        prompt = [token for step in random_steps(chance, chance.randrange(12)) for token in step]
        steps = random_steps(chance, 60)
        found, taken = said_in_turns(detokenizer(prompt, **sampling), steps, pieces, chance)
        assert found == said(detokenizer(prompt, **sampling), steps)
        ours += taken
    assert ours > 600


@pytest.mark.parametrize("skips", [False, True])
def test_each_token_after_each_beginning(skips: bool) -> None:
    """Every token there is, after a word, half a character and a special token."""
    half, word = number(written("中文")[0]), number("the")
    for start in ([word], [word, half], [word, number("<s>")], [half, word, half]):
        for token in range(TOKENIZER.get_vocab_size()):
            steps = [[one] for one in (*start, token, half, token, word, word)]
            ours = detokenizer([], skip_special_tokens=skips)
            theirs = detokenizer([], skip_special_tokens=skips)
            found, _ = said_in_turns(ours, steps, TABLES[skips], random.Random(token))
            assert found == said(theirs, steps), (start, token)


@pytest.mark.parametrize("skips", [False, True])
def test_whole_answers_are_decoded_together(skips: bool) -> None:
    """Text, tokens and what comes next are as if vLLM had read them one by one."""
    chance, ours = random.Random(5), 0
    for _ in range(300):
        first, *steps = random_steps(chance, 40)
        ids = [token for step in steps for token in step]
        one = detokenizer([], skip_special_tokens=skips)
        other = detokenizer([], skip_special_tokens=skips)
        one.update(list(first), False)
        if TableText(one, TABLES[skips]).add(list(ids)):
            ours += 1
        else:
            one.update(list(ids), False)
        for step in (first, ids):
            other.update(list(step), False)
        for of in (one, other):
            of.get_next_output_text(False, delta=True)
        after = random_steps(chance, 6)
        assert said(one, after) == said(other, after)
    assert ours > 100


def test_a_token_with_a_text_of_its_own_is_left_to_vllm() -> None:
    """The table reads on after it."""
    pieces = Pieces(TOKENIZER, skip_special_tokens=True)
    odd, word = number("naïve"), number("the")
    pieces[odd] = None
    of = detokenizer([])
    of.update([word], False)
    table = TableText(of, pieces)
    assert table.begin()
    assert (table.read([word]), table.read([odd])) == ("the", None)
    table.write_back()
    of.update([odd], False)
    assert not table.begin()
    of.update([word], False)
    assert table.begin()
    assert [of.output_text] == [said(detokenizer([]), [[word], [word], [odd], [word]])[-1][0]]


def test_a_character_that_vllm_began_is_vllm_s() -> None:
    """The bytes of its tokens are in its stream alone."""
    of = detokenizer([])
    table = TableText(of, TABLES[True])
    assert not table.begin()
    first, *others = [number(letter) for letter in written("中")]
    of.update([number("the"), first], False)
    assert not table.begin()
    of.update([*others, number("the")], False)
    assert table.begin()


@pytest.mark.parametrize("token", [-1, 2**40])
def test_a_number_that_is_no_token_s_is_left_to_vllm(token: int) -> None:
    """Which logs it, and lets it add nothing."""
    of = detokenizer([])
    of.update([number("the")], False)
    table = TableText(of, TABLES[True])
    assert table.begin()
    assert table.read([token]) is None


def test_other_decoders_are_left_alone() -> None:
    """Llama 2's and T5's decoders look at neighbours: spaces and byte tokens."""
    for decoder in (decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel()]), None):
        tokenizer = byte_tokenizer()
        if decoder is not None:
            tokenizer.decoder = decoder
        tables = tables_for(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
        assert (tables is not None) == (decoder is None)


def test_the_engine_decodes_by_the_table(
    run: LoopThread, vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the real engine, too; the text is the tokenizer's."""
    added: list[int] = []
    add = TableText.add

    def counted(self: TableText, ids: list[int]) -> bool:
        added.extend(ids)
        return add(self, ids)

    monkeypatch.setattr(TableText, "add", counted)
    sampling = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    (chunk,) = run(collect(vllm_engine, GenerationJob("table", "Once upon a time", sampling)))
    tokenizer: Any = vllm_engine.tokenizer
    ids = [token.id for token in chunk.tokens]
    assert added == ids[1:-1]
    assert chunk.text == tokenizer.decode(ids)
