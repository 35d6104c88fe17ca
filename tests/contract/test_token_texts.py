"""The texts of tokens that come together are those of tokens that come one by one."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.chunks import MOST_WAITING, ChunkMaker
from lmi_vllm.messages import GenerationJob

pytestmark = pytest.mark.vllm
tokenizers = pytest.importorskip("tokenizers", reason="needs vLLM: make setup installs it")
TEXTS = (
    " Paris. The city lies on the river Seine.",
    "日本語の文章 🙂🙂 naïve ünd so; the end of it",
    "a</s><|user|>b </s> 👩‍👩‍👧 c",
    "  two  spaces \n\n and\tlines ",
    "�� kept",
)
CUTS = random.Random(7)


def byte_level() -> Any:
    """Return the embedded model's tokenizer."""
    from transformers import AutoTokenizer  # noqa: PLC0415 (comes with vLLM)

    return AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)


def sentence_piece() -> Any:
    """Return a tokenizer as of Llama 2: words begin with a space, the first of a text loses it."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 (comes with vLLM)

    words = {letter: 300 + place for place, letter in enumerate("▁abcdefgh. ")}
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | words | {"▁Par": 400, "is": 401}
    model = tokenizers.models.BPE(
        pieces | {"</s>": 500}, [], byte_fallback=True, unk_token=None, fuse_unk=True
    )
    found = tokenizers.Tokenizer(model)
    found.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="</s>")


def one_by_one(tokenizer: Any, ids: list[int], *, is_skipping: bool) -> Iterator[str]:
    """Yield what vLLM's stream decoder says of each token, after a prompt."""
    stream = tokenizers.decoders.DecodeStream(skip_special_tokens=is_skipping)
    stream.step(tokenizer._tokenizer, ids[0])
    for token in ids[1:]:
        yield stream.step(tokenizer._tokenizer, token) or ""


def in_steps(
    tokenizer: Any, ids: list[int], texts: list[str], *, most: int, is_skipping: bool
) -> list[str]:
    """Return the texts of tokens that come in steps of `most` at most, the first one alone."""
    job = GenerationJob("r", "x", {"skip_special_tokens": is_skipping})
    maker = ChunkMaker(job, tokenizer, frozenset())
    found, place = [], 0
    while place < len(ids):
        count = CUTS.randint(1, most) if place else 1
        step = slice(place, place + count)
        found += [token.text for token in maker.tokens(ids[step], "".join(texts[step]), None)]
        place += count
    return found


@pytest.mark.parametrize("is_skipping", [True, False])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("most", [3, 8, 1000])
def test_texts_are_those_of_single_tokens(text: str, is_skipping: bool, most: int) -> None:
    """Of characters of several tokens and special tokens, however many tokens come together."""
    tokenizer = byte_level()
    ids = tokenizer.encode(f"x{text}", add_special_tokens=False)
    expected = list(one_by_one(tokenizer, ids, is_skipping=is_skipping))
    assert "".join(expected)
    options = {"most": most, "is_skipping": is_skipping}
    for _ in range(5):
        assert in_steps(tokenizer, ids[1:], expected, **options) == expected


@pytest.mark.parametrize("is_skipping", [True, False])
@pytest.mark.parametrize("count", [1, 5, 20, 300])
def test_bytes_that_are_no_text_take_no_other_text_with_them(count: int, is_skipping: bool) -> None:
    """However many there are, the words after them are theirs, as in a stream."""
    tokenizer = byte_level()
    start, broken = tokenizer.encode("x日", add_special_tokens=False)[:2]
    words = tokenizer.encode(" a b c", add_special_tokens=False)
    ids = [start, *[broken] * count, *words, *[1] * count, broken, 1, *words, broken]
    expected = list(one_by_one(tokenizer, ids, is_skipping=is_skipping))
    for most in (3, 1000):
        assert (
            in_steps(tokenizer, ids[1:], expected, most=most, is_skipping=is_skipping) == expected
        )


def test_first_word_of_what_is_decoded_keeps_its_space() -> None:
    """A tokenizer as of Llama 2 leaves it out: each token's text was empty but the last one's."""
    tokenizer = sentence_piece()
    ids = [400, 401, 302, 308, 400, 401, 0xE6, 0x97, 0xA5, 303, 400]
    expected = list(one_by_one(tokenizer, [301, *ids], is_skipping=True))
    assert expected == [" Par", "is", "b", "h", " Par", "is", "", "", "日", "c", " Par"]
    assert in_steps(tokenizer, ids, expected, most=1000, is_skipping=True) == expected


def test_text_that_is_not_the_tokens_is_the_last_one_s() -> None:
    """Cut at a stop string, or held back and sent with later tokens."""
    tokenizer = byte_level()
    maker = ChunkMaker(GenerationJob("r", "x"), tokenizer, frozenset())
    ids = tokenizer.encode(" Paris. The city", add_special_tokens=False)
    pieces = [tokenizer.decode([token]) for token in ids]
    texts = [token.text for token in maker.tokens(ids, " Paris. Th", None)]
    assert "".join(texts) == " Paris. Th"
    assert texts[:4] == pieces[:4]
    held = ChunkMaker(GenerationJob("r", "x"), tokenizer, frozenset())
    first = held.tokens(ids[:4], "".join(pieces[:3]), None)
    later = held.tokens(ids[4:], "".join(pieces[3:]), None)
    assert [token.text for token in first] == [*pieces[:3], ""]
    assert [token.text for token in later] == [pieces[3] + pieces[4], *pieces[5:]]


def test_search_for_a_beginning_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is another than the tokens' costs no time that grows with its square."""
    tokenizer, decoded = byte_level(), []
    decode = tokenizer.decode

    def counted(ids: list[int], **options: Any) -> Any:
        decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    maker = ChunkMaker(GenerationJob("r", "x"), tokenizer, frozenset())
    ids = tokenizer.encode("The sea is wide. " * 50, add_special_tokens=False)
    assert "".join(token.text for token in maker.tokens(ids, "another", None)) == "another"
    assert len(decoded) == MOST_WAITING


def test_sequences_of_a_job_wait_apart() -> None:
    """A part of a character of one is none of the other's."""
    tokenizer = byte_level()
    maker = ChunkMaker(GenerationJob("r", "x"), tokenizer, frozenset())
    ids = tokenizer.encode("日", add_special_tokens=False)
    assert len(ids) > 2
    maker.tokens(ids[:2], "", None, 0)
    word = tokenizer.encode(" a b", add_special_tokens=False)
    other = maker.tokens(word, " a b", None, 1)
    assert [token.text for token in other] == [tokenizer.decode([token]) for token in word]
    rest = [token.text for token in maker.tokens([*ids[2:], *word], "日 a b", None, 0)]
    assert rest == [*[""] * (len(ids) - 3), "日", *(tokenizer.decode([token]) for token in word)]
