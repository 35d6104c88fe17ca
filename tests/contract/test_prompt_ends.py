"""An answer never begins with the prompt, whatever the prompt ends with."""

import atexit
import random
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import mistral_common
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm import outputs
from lmi_vllm.engine.vllm.jobs import PromptTokenizer
from lmi_vllm.engine.vllm.workarounds.prompt_ends import BROKEN, begin_after, prompt_end
from lmi_vllm.messages import GenerationJob, OpenAICall
from tests.contract.conftest import LoopThread, collect
from tests.contract.test_direct_tokens import Reader, read

pytestmark = pytest.mark.vllm
SECRET: Final = "The word is kumquat. "
DATA: Final = Path(mistral_common.__file__).parent / "data"


@cache
def byte_level() -> Any:
    """Return a tokenizer whose tokens are single bytes, as the small change of Llama 3 and Qwen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def byte_fallback() -> Any:
    """Return a tokenizer of words and bytes, as Llama 2's: a run of bytes is decoded as one."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyzT."]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def tekken() -> Any:
    """Return Mistral's own tokenizer, which vLLM decodes in another way."""
    folder = mkdtemp()  # a copy of the tokenizer reads it again
    atexit.register(shutil.rmtree, folder)
    shutil.copyfile(DATA / "tekken_240911.json", Path(folder) / "tekken.json")
    return MistralTokenizer.from_pretrained(folder)


TOKENIZERS: Final = {"bytes": byte_level, "words and bytes": byte_fallback, "Mistral's": tekken}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text alone."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def detokenizer(tokenizer: Any, prompt: Sequence[int], **sampling: Any) -> Any:
    """Return vLLM's detokenizer of a new sequence."""
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=list(prompt), mm_features=None,
        sampling_params=SamplingParams(**sampling), pooling_params=None, arrival_time=0.0,
        lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def answer(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], **sampling: Any) -> str:
    """Return the text of an answer's tokens, read one by one."""
    made = detokenizer(tokenizer, prompt, **sampling)
    begin_after(made, prompt)
    for token in tokens:
        if made.update([token], stop_terminated=False) is not None:
            break
    return str(made.output_text)


# What the prompt's last character lacks at its end, and how the answer goes on.
ENDS: Final = {
    "whole": ("It is", 0, " warm.", " warm."),
    "replacement": (f"It is {BROKEN}", 0, " warm.", " warm."),
    "three of them": (f"It is {BROKEN * 3}", 0, " warm.", " warm."),
    "one alone": (BROKEN, 0, " warm.", " warm."),
    "a hundred": (BROKEN * 100, 0, " warm.", " warm."),
    "half a character": ("It is é", 1, "é", "é"),
    "half, after a line": ("It is\né", 1, "é", "é"),
    "a third, after others": (f"It is {BROKEN}中", 2, "中", "中"),
    "three quarters": ("It is 🙂", 1, "🙂", "🙂"),
    "never completed": ("It is 🙂", 2, " warm.", " warm."),
    "after forty others": ("中文" * 20 + "é", 1, "é", "é"),
    "never completed, after a line": ("It is\n🙂", 2, " warm.", " warm."),
}  # fmt: skip


def continued(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text within another."""
    return ids_of(tokenizer, f"a{text}")[len(ids_of(tokenizer, "a")) :]


def cut(tokenizer: Any, end: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and of its answer; the test is skipped where none is cut."""
    text, missing, follows, _ = ENDS[end]
    whole = ids_of(tokenizer, SECRET + text)
    prompt = whole[: len(whole) - missing]
    if missing and not tokenizer.decode(prompt).endswith(BROKEN):
        pytest.skip("one token is the whole character")
    is_completed = text.endswith(follows)
    rest = whole[len(prompt) :] if is_completed else continued(tokenizer, follows)
    return prompt, [*rest, *continued(tokenizer, " b")]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_begins_after_the_prompt(name: str, end: str) -> None:
    """A character that the prompt begins and the answer completes is the answer's."""
    prompt, tokens = cut(TOKENIZERS[name](), end)
    assert answer(TOKENIZERS[name](), prompt, tokens) == f"{ENDS[end][-1]} b"


@pytest.mark.parametrize("name", ["bytes", "words and bytes"])
def test_stop_strings_are_found_in_the_answer_only(name: str) -> None:
    """One that the prompt has does not end it."""
    prompt, tokens = cut(TOKENIZERS[name](), "replacement")
    assert answer(TOKENIZERS[name](), prompt, tokens, stop=["kumquat"]) == " warm. b"
    assert answer(TOKENIZERS[name](), prompt, tokens, stop=["rm"]) == " wa"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_other_prompts_are_continued_as_by_vllm(name: str) -> None:
    """Any tokens after any prompt whose text is complete, special and unknown ones too."""
    tokenizer, chance = TOKENIZERS[name](), random.Random(7)
    size = len(tokenizer) + 2 * (name != "Mistral's")
    tried = 0
    while tried < 150:
        prompt = [chance.randrange(size) for _ in range(chance.randrange(1, 90))]
        prompt += continued(tokenizer, chance.choice((" a", "b.", "中", "")))
        is_complete = prompt_end(prompt, tokenizer.decode).is_complete
        if not is_complete or tokenizer.decode(prompt).endswith(BROKEN):
            continue
        tried += 1
        tokens = [chance.randrange(size) for _ in range(8)]
        theirs = detokenizer(tokenizer, prompt)
        theirs.update(tokens, stop_terminated=False)
        assert answer(tokenizer, prompt, tokens) == theirs.output_text


def test_mistral_s_tokenizer_has_no_places_of_tokens(run: LoopThread) -> None:
    """Its tokens are listed nevertheless, as TGI's `/tokenize` and LMI's hooks ask for them."""
    tokens = run(PromptTokenizer(tekken()).tokenize("a b", add_special_tokens=False))
    assert [token.id for token in tokens] == ids_of(tekken(), "a b")
    assert {(token.start, token.stop) for token in tokens} == {(0, 0)}


def test_prompts_of_special_tokens_alone_have_no_text() -> None:
    """The answer is all that is decoded; a prompt of vectors has no tokens at all."""
    tokenizer = byte_fallback()
    start = tokenizer.convert_tokens_to_ids("<s>")
    for prompt in ([], [start], [start] * 5000):
        assert answer(tokenizer, prompt, ids_of(tokenizer, "a b")) == "a b"
    assert answer(tokenizer, ids_of(tokenizer, SECRET) + [start] * 900, [3]) != ""


@pytest.mark.parametrize("name", ["bytes", "words and bytes"])
def test_plain_vllm_repeats_a_prompt_that_ends_inside_a_character(name: str) -> None:
    """Once this fails, `prompt_ends` may go."""
    prompt, tokens = cut(TOKENIZERS[name](), "half a character")
    plain = detokenizer(TOKENIZERS[name](), prompt)
    plain.update(tokens, stop_terminated=False)
    assert "kumquat" in plain.output_text


ANSWERED: Final = (f"{SECRET}It is {BROKEN}", f"{SECRET}{BROKEN * 40}", BROKEN)


@pytest.mark.parametrize("prompt", ANSWERED)
@pytest.mark.parametrize("has_lane", [True, False], ids=["lane", "vllm"])
def test_engine_answers_without_the_prompt(
    run: LoopThread, vllm_engine: Engine, has_lane: bool, prompt: str
) -> None:
    """Streamed to a reader, streamed and whole: one text, which is that of its tokens."""
    processor: outputs.EngineOutputs = vllm_engine._llm.output_processor  # type: ignore[attr-defined]
    lane = processor.lane
    processor.lane = lane if has_lane else None

    async def texts() -> set[str]:
        sampling = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        whole = GenerationJob("whole", prompt, sampling)
        parts = GenerationJob("parts", prompt, sampling, is_streaming=True)
        several = GenerationJob("n", prompt, {**sampling, "n": 2, "temperature": 1.0, "seed": 1})
        reader = Reader()
        await read(vllm_engine, parts, reader)
        found = [
            reader.chunks,
            await collect(vllm_engine, parts),
            await collect(vllm_engine, whole),
        ]
        for chunk in await collect(vllm_engine, several):
            assert "kumquat" not in chunk.text
        ids = [token.id for chunk in found[0] for token in chunk.tokens]
        decoded = vllm_engine.tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]
        joined = {"".join(chunk.text for chunk in chunks) for chunks in found}
        return joined | {decoded.rstrip(BROKEN)}

    try:
        found = run(texts())
    finally:
        processor.lane = lane
    assert len(found) == 1, found
    assert found.isdisjoint({""})
    assert "kumquat" not in "".join(found)


CHAT: Final = {
    "messages": [
        {"role": "system", "content": SECRET},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": f"It is {BROKEN}"},
    ],
    "add_generation_prompt": False,
    "continue_final_message": True,
}
ROUTES: Final[dict[str, dict[str, Any]]] = {
    "chat/completions": CHAT,
    "completions": {"prompt": f"{SECRET}It is {BROKEN}"},
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_openai_answers_do_not_show_the_system_message(
    run: LoopThread, vllm_engine: Engine, route: str, is_streamed: bool
) -> None:
    """With a stop string of the system message, too: nothing of it is in the answer's text."""
    body = {
        **ROUTES[route], "model": "lmi", "temperature": 0, "max_tokens": 12, "ignore_eos": True,
        "stop": ["kumquat"], "stream": is_streamed,
    }  # fmt: skip

    async def said() -> bytes:
        reply = await vllm_engine.answer_openai(OpenAICall(route, body, {}, "ends"))
        if not is_streamed:
            return bytes(reply.body)
        assert reply.stream is not None
        return b"".join([event async for event in reply.stream])

    found = run(said())
    assert b'"finish_reason":"length"' in found.replace(b": ", b":")
    assert b"The word" not in found
