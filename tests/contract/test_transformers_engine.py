"""The Transformers engine answers as Transformers' own `generate`, whatever is in its batch."""

import asyncio
import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import (
    EngineDeadError,
    EngineFailureError,
    EngineStartError,
    PayloadError,
)
from lmi_vllm.messages import BeamSearch, GenerationChunk, GenerationJob, OpenAICall
from tests.contract.conftest import LoopThread, collect, start_t5_engine
from tests.support.hostile_values import HUGE, hostile_bodies

pytestmark = pytest.mark.vllm
PROMPTS = (
    "The capital of France is",
    "moon",
    "translate English to German: How old are you? The house is wonderful, and the lamp is red.",
    "Once upon a time there was",
    "summarize: a b c d e f g",
)
LONG = 60
# A request for so many sequences does not come so far.
HOSTILE = [
    (name, [body for body in bodies if body.get("n") != HUGE]) for name, bodies in hostile_bodies()
]


class Reference:
    """Transformers' own model."""

    def __init__(self, folder: Path) -> None:
        from transformers import (  # noqa: PLC0415 (slow)
            AutoModelForSeq2SeqLM,
            AutoTokenizer,
        )

        self.model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def tokens(self, prompt: str, count: int, **options: Any) -> list[int]:
        """Return the greedy answer's tokens."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        answer = self.model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=False,
            max_new_tokens=count, **options,
        )  # fmt: skip
        return list(answer[0, 1:].tolist())

    def text(self, tokens: list[int]) -> str:
        """Return what the tokens say."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.fixture(scope="module")
def reference(t5_folder: Path) -> Reference:
    """The same checkpoint in Transformers."""
    return Reference(t5_folder)


def job(prompt: str, *, is_streaming: bool = False, **sampling: object) -> GenerationJob:
    """Return a greedy job."""
    fields = {"max_tokens": LONG, "temperature": 0.0, **sampling}
    return GenerationJob(f"t5-{prompt[:5]}", prompt, fields, is_streaming=is_streaming)


def ids(chunks: list[GenerationChunk]) -> list[int]:
    """Return the tokens of all chunks."""
    return [token.id for chunk in chunks for token in chunk.tokens]


def text(chunks: list[GenerationChunk]) -> str:
    """Return the text of all chunks."""
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_tokens_equal_transformers_when_requests_join_midway(
    run: LoopThread, t5_folder: Path, reference: Reference, rows: int
) -> None:
    """Prompts and answers of many lengths, each joining while others are at another token."""
    engine = start_t5_engine(run, t5_folder, max_num_seqs=rows)
    counts = itertools.cycle((LONG, 7, 31, 1, 18))
    asked = [(prompt, next(counts)) for prompt in (*PROMPTS, *PROMPTS[::-1])]

    async def one(position: int, prompt: str, count: int) -> tuple[list[int], str]:
        while engine.progress < 5 * position and engine.running_requests:  # noqa: ASYNC110
            await asyncio.sleep(0)  # joins when those before it have made some steps
        is_streaming = position % 2 == 0
        chunks = await collect(engine, job(prompt, is_streaming=is_streaming, max_tokens=count))
        assert len(chunks) == (len(ids(chunks)) if is_streaming else 1)
        return ids(chunks), text(chunks)

    async def all_of_them() -> list[tuple[list[int], str]]:
        works = [one(position, *each) for position, each in enumerate(asked)]
        return await asyncio.gather(*works)

    answers = run(all_of_them())
    run(engine.close())
    expected = [reference.tokens(prompt, count) for prompt, count in asked]
    assert [tokens for tokens, _ in answers] == expected
    assert [said for _, said in answers] == [reference.text(tokens) for tokens in expected]
    assert len(set(itertools.chain(*expected))) > 20  # else equal tokens would show little


_RELATIVE = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_ABSOLUTE = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "max_position_embeddings": 128, "forced_eos_token_id": None,
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "T5": _RELATIVE, "MT5": _RELATIVE, "UMT5": _RELATIVE, "Bart": _ABSOLUTE, "MBart": _ABSOLUTE,
    "Pegasus": _ABSOLUTE, "Blenderbot": _ABSOLUTE,
}  # fmt: skip


def logits_at_once(model: Any, prompt: list[int], words: list[int]) -> Any:
    """Return Transformers' logits of a whole answer, where it computes it without reading ahead."""
    import torch  # noqa: PLC0415 (slow)

    def logits(count: int) -> Any:
        answer = torch.tensor([[0, *words[:count]]])
        return model(input_ids=torch.tensor([prompt]), decoder_input_ids=answer).logits[0]

    found = logits(len(words))
    if not torch.allclose(found[:4], logits(3), atol=2e-4, rtol=1e-4):
        pytest.skip("this Transformers reads ahead in a whole answer (UMT5 in 5.17)")
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_a_changing_batch_equal_those_of_a_single_row(family: str) -> None:
    """Every family of the list: rows of other lengths beside it change no logit of a row."""
    import torch  # noqa: PLC0415 (slow)
    import transformers  # noqa: PLC0415 (slow)

    from lmi_vllm.features.seq2seq.decoding import DecodingBatch  # noqa: PLC0415 (imports torch)
    from lmi_vllm.features.seq2seq.rules import ARCHITECTURES  # noqa: PLC0415

    assert {f"{name}ForConditionalGeneration" for name in FAMILIES} == ARCHITECTURES
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=200, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        **FAMILIES[family],
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.inference_mode():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.3)
        prompts = [torch.randint(3, 200, (length,)).tolist() for length in (5, 17, 2, 9)]
        words = [torch.randint(3, 200, (12,)).tolist() for _ in prompts]
        batch, live = DecodingBatch(model, 0), list[int]()
        seen: dict[int, list[Any]] = {}
        for turn in range(40):
            if live:
                logits = batch.step([words[row][len(seen[row]) - 1] for row in live])
                for row, scores in zip(live, logits, strict=True):
                    seen[row].append(scores)
                stays = [place for place, row in enumerate(live) if len(seen[row]) < 9 + row]
                batch.keep(stays)
                live = [live[place] for place in stays]
            if turn % 4 == 0 and len(seen) < len(prompts):
                row = len(seen)
                seen[row] = [batch.join(batch.encode(prompts[row]))]
                live.append(row)
        for row, rows in seen.items():
            alone = logits_at_once(model, prompts[row], words[row][: len(rows) - 1])
            assert len(rows) == 9 + row
            assert torch.allclose(torch.stack(rows), alone, atol=2e-4, rtol=1e-4)
            assert float(alone.std()) > 0.1  # else close would show little


def test_short_answer_does_not_wait_for_a_long_one(run: LoopThread, t5_engine: Engine) -> None:
    """No head-of-line blocking: who comes later and wants little is done first."""

    async def scenario() -> int:
        long = t5_engine.generate(
            job(PROMPTS[0], is_streaming=True, max_tokens=600, ignore_eos=True)
        )
        await anext(long)
        before = t5_engine.progress
        await collect(t5_engine, job(PROMPTS[1], max_tokens=3))
        spent = t5_engine.progress - before
        assert t5_engine.running_requests == 1  # the long one goes on
        await long.aclose()
        return spent

    assert run(scenario()) < 300


# The routes refuse both: what else fails in a step must be like them.
FAILING: dict[str, dict[str, object]] = {
    "before the first token": {"seed": 2**65},
    "with a token": {"temperature": math.inf, "allowed_token_ids": [5, 6]},
}


@pytest.mark.parametrize("fields", FAILING.values(), ids=FAILING)
def test_request_that_fails_in_a_step_ends_alone(
    run: LoopThread, t5_engine: Engine, fields: dict[str, object]
) -> None:
    """An unforeseen error ends its own request; the batch goes on, and nothing is left."""

    async def scenario() -> None:
        honest = job(PROMPTS[0], is_streaming=True, ignore_eos=True)
        alone = ids(await collect(t5_engine, honest))
        stream = t5_engine.generate(honest)
        chunks = [await anext(stream)]
        for _ in range(2):
            with pytest.raises(EngineFailureError, match=r"RuntimeError|OverflowError|ValueError"):
                await collect(t5_engine, job("moon", **{"n": 3, "temperature": 1.0, **fields}))
        chunks += [chunk async for chunk in stream]
        assert ids(chunks) == alone
        with pytest.raises(EngineFailureError):
            await collect(t5_engine, job("moon", **{"temperature": 1.0, **fields}))
        async with asyncio.timeout(10):
            while t5_engine.running_requests:  # noqa: ASYNC110 (the thread has no event)
                await asyncio.sleep(0.01)

    run(scenario())


@pytest.mark.parametrize(("name", "bodies"), HOSTILE, ids=[row[0] for row in HOSTILE])
def test_hostile_fields_end_no_other_request(
    run: LoopThread, t5_engine: Engine, name: str, bodies: list[dict[str, Any]]
) -> None:
    """Answered or refused; the web layer's own bounds are tried in integration."""

    async def scenario() -> None:
        stream = t5_engine.generate(job(PROMPTS[0], is_streaming=True, ignore_eos=True))
        await anext(stream)
        for body in bodies:
            reply = await t5_engine.answer_openai(OpenAICall("completions", body, {}, name))
            assert reply.status < 500, (body, reply.body)
        assert [chunk async for chunk in stream][-1].finish_reason == "length"

    run(scenario())


def test_long_text_is_refused_before_it_is_tokenized(run: LoopThread, t5_engine: Engine) -> None:
    """6 MB took 3 to 33 s; cut to a few tokens, no more than those are read."""

    async def scenario() -> float:
        began = time.monotonic()
        with pytest.raises(PayloadError, match="characters"):
            await collect(t5_engine, job("moon " * 1_200_000))
        cut = replace(job("moon " * 1_200_000, max_tokens=2), truncate_prompt_tokens=5)
        few = replace(job("moon " * 100, max_tokens=2), truncate_prompt_tokens=5)
        assert ids(await collect(t5_engine, cut)) == ids(await collect(t5_engine, few))
        return time.monotonic() - began

    assert run(scenario()) < 2.0


def test_min_tokens_and_bad_words_match_transformers(
    run: LoopThread, t5_engine: Engine, reference: Reference
) -> None:
    """Wishes that `generate` has as well lead to its tokens."""
    for prompt in PROMPTS:
        plain = reference.tokens(prompt, LONG)
        least = ids(run(collect(t5_engine, job(prompt, min_tokens=LONG - 5))))
        assert least == reference.tokens(prompt, LONG, min_new_tokens=LONG - 5)
        word = reference.text([plain[0]]).strip()
        banned = [
            reference.tokenizer.encode(w, add_special_tokens=False) for w in (word, f" {word}")
        ]
        seen = ids(run(collect(t5_engine, job(prompt, bad_words=[word]))))
        assert seen == reference.tokens(prompt, LONG, bad_words_ids=banned)


def test_repetition_penalty_looks_at_the_answer(run: LoopThread, t5_engine: Engine) -> None:
    """A heavy penalty takes no token twice while others are left."""
    tokens = ids(run(collect(t5_engine, job(PROMPTS[3], repetition_penalty=2.0, max_tokens=40))))
    plain = ids(run(collect(t5_engine, job(PROMPTS[3], max_tokens=40))))
    assert len(set(tokens)) > len(set(plain))


def test_seed_repeats_and_candidates_differ(run: LoopThread, t5_engine: Engine) -> None:
    """The same seed gives the same tokens, another one others; n gives that many sequences."""
    asked = job(PROMPTS[0], temperature=1.0, seed=7, n=3, max_tokens=20)
    first, second = run(collect(t5_engine, asked)), run(collect(t5_engine, asked))
    by_index = [sorted(chunks, key=lambda chunk: chunk.index) for chunks in (first, second)]
    assert ids(by_index[0]) == ids(by_index[1])
    assert len({tuple(ids([chunk])) for chunk in first}) == 3
    alone = run(collect(t5_engine, job(PROMPTS[0], temperature=1.0, seed=8, max_tokens=20)))
    assert ids(alone) == ids([by_index[0][1]])  # the second candidate has the next seed


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_narrowest_sampling_is_greedy(
    run: LoopThread, t5_engine: Engine, narrow: dict[str, object]
) -> None:
    """Where one token is left to draw from, it is the most probable one."""
    drawn = run(collect(t5_engine, job(PROMPTS[0], temperature=3.0, **narrow)))
    assert ids(drawn) == ids(run(collect(t5_engine, job(PROMPTS[0]))))


def test_logprobs_are_the_model_s_own(
    run: LoopThread, t5_engine: Engine, reference: Reference
) -> None:
    """Of the sampled token and the best ones, as Transformers' logits have them."""
    import torch  # noqa: PLC0415 (slow)

    (chunk,) = run(collect(t5_engine, job(PROMPTS[0], logprobs=3, max_tokens=8)))
    inputs = reference.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    decoder = torch.tensor([[0, *ids([chunk])[:-1]]])
    with torch.inference_mode():
        logits = reference.model(input_ids=inputs, decoder_input_ids=decoder).logits[0]
    values, tokens = torch.log_softmax(logits, -1).topk(3)
    for position, token in enumerate(chunk.tokens):
        assert [one.id for one in token.top] == tokens[position].tolist()
        assert [one.logprob for one in token.top] == pytest.approx(
            values[position].tolist(), abs=1e-4
        )
        assert token.logprob == token.top[0].logprob


@pytest.mark.parametrize("keeps", [False, True])
def test_stop_string_ends_the_text(run: LoopThread, t5_engine: Engine, keeps: bool) -> None:
    """Streamed or not, the text ends before the stop string, or with it; nothing of it leaks."""
    whole = text(run(collect(t5_engine, job(PROMPTS[0]))))
    stop = whole[9:13]
    end = whole.index(stop) + (len(stop) if keeps else 0)
    for is_streaming in (True, False):
        asked = job(PROMPTS[0], is_streaming=is_streaming, stop=[stop, "never said"],
                    include_stop_str_in_output=keeps)  # fmt: skip
        chunks = run(collect(t5_engine, asked))
        assert text(chunks) == whole[:end]
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)


def test_stop_token_is_named(run: LoopThread, t5_engine: Engine) -> None:
    """A stop token ends the sequence and is among its tokens, not in its text."""
    plain = run(collect(t5_engine, job(PROMPTS[0])))
    stop = ids(plain)[5]
    where = ids(plain).index(stop)
    chunks = run(collect(t5_engine, job(PROMPTS[0], is_streaming=True, stop_token_ids=[stop])))
    assert ids(chunks) == ids(plain)[: where + 1]
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason, chunks[-1].text) == ("stop", stop, "")


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"structured_outputs": {"regex": "a"}}, "guided"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 500}, "max_logprobs"),
        ({"temperature": -1.0}, "temperature"),
        ({"n": 2, "temperature": 0.0}, "greedy"),
        ({"max_tokens": 5000}, "max_model_len"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"watermarking": True}, "watermarking"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "min_tokens": 3}, "no token is left"),
        ({"allowed_token_ids": [1], "min_tokens": 3, "temperature": 1.0}, "no token is left"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_parameters_are_refused_by_name(
    run: LoopThread, t5_engine: Engine, sampling: dict[str, object], words: str
) -> None:
    """A field out of range, or one this engine lacks, is the client's fault and named."""
    with pytest.raises(PayloadError, match=words):
        run(collect(t5_engine, job(PROMPTS[0], **sampling)))
    run(t5_engine.check_health())


def test_beam_search_is_refused(run: LoopThread, t5_engine: Engine) -> None:
    """T5 is often used with beams: the refusal says that there are none."""
    asked = GenerationJob("beams", PROMPTS[0], {"max_tokens": 4}, beams=BeamSearch(4))
    with pytest.raises(PayloadError, match="num_beams"):
        run(collect(t5_engine, asked))


def test_truncation_keeps_the_end_of_the_prompt(run: LoopThread, t5_engine: Engine) -> None:
    """The last tokens stay, and the end token that T5 wants after a prompt is one of them."""
    cut = GenerationJob("cut", PROMPTS[2], {"max_tokens": 9, "temperature": 0.0},
                        truncate_prompt_tokens=5)  # fmt: skip
    (chunk,) = run(collect(t5_engine, cut))
    assert chunk.prompt_tokens == 5
    tail = run(t5_engine.tokenize(PROMPTS[2], add_special_tokens=True))[-5:]
    body = {"prompt": [token.id for token in tail], "max_tokens": 9, "temperature": 0,
            "return_token_ids": True}  # fmt: skip
    reply = run(t5_engine.answer_openai(OpenAICall("completions", body, {}, "cut")))
    assert orjson.loads(reply.body)["choices"][0]["token_ids"] == ids([chunk])


SAME_WISHES: Mapping[str, tuple[dict[str, object], dict[str, object]]] = {
    "greedy": ({}, {"temperature": 0}),
    "seeded": ({"temperature": 0.9, "seed": 7, "top_p": 0.8}, {
        "temperature": 0.9, "seed": 7, "top_p": 0.8}),
    "n": ({"temperature": 1.4, "seed": 3, "n": 2}, {"temperature": 1.4, "seed": 3, "n": 2}),
    "stop": ({"stop": ["o"]}, {"temperature": 0, "stop": "o"}),
    "bias": ({"logit_bias": {30: 40.0}}, {"temperature": 0, "logit_bias": {"30": 40}}),
    "penalties": ({"frequency_penalty": 1.9, "presence_penalty": 1.0}, {
        "temperature": 0, "frequency_penalty": 1.9, "presence_penalty": 1.0}),
    "bad words": ({"bad_words": ["en"]}, {"temperature": 0, "bad_words": ["en"]}),
}  # fmt: skip


@pytest.mark.parametrize("wish", SAME_WISHES)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_openai_lane_gives_the_same_tokens(
    run: LoopThread, t5_engine: Engine, wish: str, is_streaming: bool
) -> None:
    """Both lanes answer one wish with the same tokens and text, streamed or not."""
    sampling, fields = SAME_WISHES[wish]
    ours = run(collect(t5_engine, job(PROMPTS[0], max_tokens=16, **sampling)))
    body = {"prompt": PROMPTS[0], "max_tokens": 16, "return_token_ids": True, **fields,
            "stream": is_streaming}  # fmt: skip
    choices = run(_choices(t5_engine, "completions", body))
    found: dict[int, tuple[list[int], str]] = {}
    for choice in choices:
        tokens, said = found.get(choice["index"], ([], ""))
        found[choice["index"]] = (tokens + choice["token_ids"], said + choice["text"])
    assert found == {chunk.index: (ids([chunk]), chunk.text) for chunk in ours}


async def _choices(engine: Engine, kind: str, body: dict[str, object]) -> list[Any]:
    reply = await engine.answer_openai(OpenAICall(kind, body, {}, "lane"))
    assert reply.status == 200, reply.body
    if reply.stream is None:
        return list(orjson.loads(reply.body)["choices"])
    events = [event async for event in reply.stream]
    assert events[-1] == b"data: [DONE]\n\n"
    rows = [orjson.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    return [choice for row in rows for choice in row["choices"]]


def test_chat_uses_the_tokenizer_s_template(
    run: LoopThread, t5_engine: Engine, reference: Reference
) -> None:
    """Messages become the template's text; its tokens are answered, streamed and not."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "moon"}]}]
    body: dict[str, object] = {"messages": messages, "max_tokens": 12, "temperature": 0,
                               "return_token_ids": True, "logprobs": True}  # fmt: skip
    (whole,) = run(_choices(t5_engine, "chat/completions", body))
    events = run(_choices(t5_engine, "chat/completions", {**body, "stream": True}))
    streamed = "".join(event["delta"].get("content", "") for event in events)
    prompt = "user: moon\nassistant:"
    import torch  # noqa: PLC0415 (slow)

    tokens = reference.tokenizer.encode(prompt, add_special_tokens=False)
    answer = reference.model.generate(
        input_ids=torch.tensor([tokens]), do_sample=False, max_new_tokens=12
    )
    assert whole["token_ids"] == answer[0, 1:].tolist()
    assert whole["message"]["content"] == streamed == reference.text(whole["token_ids"])
    assert [token["logprob"] <= 0 for token in whole["logprobs"]["content"]] == [True] * 12


@pytest.mark.parametrize(
    ("kind", "body", "status", "words"),
    [
        ("completions", {"prompt": "x", "echo": True}, 400, "echo"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("completions", {"prompt": "x", "use_beam_search": True}, 400, "use_beam_search"),
        ("completions", {"prompt": "x", "guided_json": {}}, 400, "guided_json"),
        ("completions", {"prompt": "x", "structured_outputs": {"regex": "a"}}, 400, "grammars"),
        ("completions", {"prompt": "x", "prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ("completions", {"prompt": "x", "response_format": {"type": "json_object"}}, 400, "gramm"),
        ("completions", {"prompt": "x", "priority": 3}, 400, "priority"),
        ("completions", {"prompt": "x", "model": "nobody"}, 404, "nobody"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": None}, 400, "prompt"),
        ("completions", {"prompt": 3.5}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [10**9]}, 400, "token id"),
        ("completions", {"prompt": "x", "max_tokens": 9999}, 400, "max_model_len"),
        ("completions", {"prompt": "moon " * 5000}, 400, "max_model_len"),
        ("chat/completions", {"messages": 5}, 400, ""),
        ("chat/completions", {"messages": [None]}, 400, ""),
        ("chat/completions", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:,"}}]}]}, 400, "text only"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [
            {"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ("responses", {"input": "x"}, 404, "support responses"),
        ("embeddings", {"input": "x"}, 404, "support embeddings"),
    ],
)  # fmt: skip
def test_openai_refusals_are_replies_that_name_the_field(
    run: LoopThread, t5_engine: Engine, kind: str, body: dict[str, object], status: int, words: str
) -> None:
    """Nothing is ignored: what this engine lacks is an error in vLLM's shape."""
    reply = run(t5_engine.answer_openai(OpenAICall(kind, body, {}, "bad")))
    assert (reply.status, reply.stream) == (status, None)
    error = orjson.loads(reply.body)["error"]
    assert error["code"] == status
    assert words in error["message"]


def test_not_finite_logits_end_only_their_request(run: LoopThread, t5_folder: Path) -> None:
    """As where a number format overflows: an error of that request; the engine lives."""
    engine: Any = start_t5_engine(run, t5_folder)

    async def scenario() -> None:
        asked = job(PROMPTS[0], is_streaming=True, max_tokens=400, ignore_eos=True)
        others = [engine.generate(asked) for _ in range(2)]
        for one in others:
            await anext(one)
        for sampling in ({}, {"temperature": 1.0, "n": 2}):
            head = engine._loaded.model.lm_head
            hook = head.register_forward_hook(  # a request that joins is computed alone, in one row
                lambda _, __, logits: logits * float("nan") if len(logits) == 1 else logits
            )
            with pytest.raises(EngineFailureError, match="not numbers"):
                await collect(engine, job(PROMPTS[1], **sampling))
            hook.remove()
        for one in others:
            assert len([chunk async for chunk in one]) == 399
        await engine.check_health()
        assert engine.running_requests == 0

    run(scenario())
    run(engine.close())


def test_negative_stop_token_and_huge_bias_are_handled(run: LoopThread, t5_engine: Engine) -> None:
    """Numbers that mean nothing change nothing, or as much as the largest that does."""
    plain = ids(run(collect(t5_engine, job(PROMPTS[0]))))
    assert ids(run(collect(t5_engine, job(PROMPTS[0], stop_token_ids=[-1], min_tokens=2)))) == plain
    forced = run(collect(t5_engine, job(PROMPTS[0], logit_bias={30: 1e300}, max_tokens=4)))
    assert ids(forced) == [30] * 4


def test_failing_step_ends_the_engine_and_all_requests(run: LoopThread, t5_folder: Path) -> None:
    """A step that fails ends what runs, what waits and what comes, and the wait for its death."""
    engine: Any = start_t5_engine(run, t5_folder, max_num_seqs=1)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    async def scenario() -> None:
        running = engine.generate(
            job(PROMPTS[0], is_streaming=True, max_tokens=600, ignore_eos=True)
        )
        await anext(running)
        waiting = asyncio.create_task(collect(engine, job(PROMPTS[1])))
        while engine.running_requests < 2:  # noqa: ASYNC110 (the thread has no event for it)
            await asyncio.sleep(0)
        engine._loaded.model.get_decoder().register_forward_pre_hook(broken)
        with pytest.raises(EngineDeadError):
            async for _ in running:
                pass
        with pytest.raises(EngineDeadError):
            await waiting
        await asyncio.wait_for(engine.wait_until_dead(), 5)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine, job(PROMPTS[0]))
        with pytest.raises(EngineDeadError):
            await engine.answer_openai(OpenAICall("completions", {"prompt": "x"}, {}, "r"))
        assert engine.running_requests == 0
        await engine.close()

    run(scenario())


def test_start_names_weights_missing_from_the_checkpoint(
    run: LoopThread, t5_folder: Path, tmp_path: Path
) -> None:
    """Missing tensors would be random numbers: the start says so instead."""
    import shutil  # noqa: PLC0415

    from safetensors.torch import load_file, save_file  # noqa: PLC0415 (slow)

    folder = tmp_path / "model"
    shutil.copytree(t5_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("decoder.block.1.layer.1.EncDecAttention.q.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineStartError, match="EncDecAttention"):
        start_t5_engine(run, folder)


def test_start_refuses_a_number_format_it_does_not_know(run: LoopThread, t5_folder: Path) -> None:
    """`dtype` is one of PyTorch's three, or auto."""
    with pytest.raises(EngineStartError, match="fp4"):
        start_t5_engine(run, t5_folder, dtype="fp4")
