"""Beam search on the real engine: vLLM's own result and transformers', adapters, cancelling."""

import asyncio
import time
from typing import Any

import orjson
import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.lmi import LmiRequest, parse_lmi_request
from lmi_vllm.inference.response.formatters import LMI_SCHEMA, format_result, rank_candidates
from lmi_vllm.messages import AdapterRef, GenerationJob, OpenAICall, ServingProfile
from tests.contract.adapter_loader import Loader
from tests.contract.conftest import DEMO_ADAPTERS, LoopThread, collect

pytestmark = pytest.mark.vllm
PROMPT = "Once upon a time"


def beams(adapter: AdapterRef | None = None, **parameters: Any) -> tuple[LmiRequest, GenerationJob]:
    """Return the request and job of a beam search."""
    payload = {"inputs": PROMPT, "parameters": {"num_beams": 3, **parameters}}
    request = parse_lmi_request(payload, ServingProfile())
    job = GenerationJob(
        "beams", PROMPT, request.sampling, adapter=adapter, beams=request.candidates.beams
    )
    return request, job


def texts(run: LoopThread, engine: Engine, job: GenerationJob) -> list[str]:
    """Return the texts of a job's sequences, best first."""
    chunks = run(collect(engine, job))
    return [chunk.text for chunk in sorted(chunks, key=lambda chunk: chunk.index)]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
def test_beams_equal_the_completion_handler_s(
    run: LoopThread, vllm_engine: Engine, width: int, length_penalty: float
) -> None:
    """The LMI lane's beams are those of vLLM's own completion handler, in its order."""
    _, job = beams(num_beams=width, length_penalty=length_penalty)
    body = {
        "prompt": PROMPT,
        "max_tokens": 30,
        "temperature": 0,
        "use_beam_search": True,
        "n": width,
        "length_penalty": length_penalty,
    }
    reply = run(vllm_engine.answer_openai(OpenAICall("completions", body, {}, "beams")))
    choices = orjson.loads(reply.body)["choices"]
    ours = texts(run, vllm_engine, job)
    assert ours == [choice["text"] for choice in choices]
    assert len(set(ours)) == width


def test_beams_equal_transformers(run: LoopThread, vllm_engine: Engine) -> None:
    """Without a length penalty the best beam and its probability are transformers' own."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    found = model.generate(
        **inputs, num_beams=4, num_return_sequences=1, max_new_tokens=12, do_sample=False,
        length_penalty=0.0, early_stopping="never", return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    expected = found.sequences[0][inputs["input_ids"].shape[1] :].tolist()
    _, job = beams(num_beams=4, length_penalty=0, max_new_tokens=12)
    best = min(run(collect(vllm_engine, job)), key=lambda chunk: chunk.index)
    assert [token.id for token in best.tokens] == expected
    assert best.cumulative_logprob == pytest.approx(found.sequences_scores[0].item(), abs=1e-3)


def test_beams_length_penalty_changes_the_order(run: LoopThread, vllm_engine: Engine) -> None:
    """A high length penalty prefers longer sequences than a low one."""

    def best_length(penalty: float) -> int:
        _, job = beams(num_beams=4, length_penalty=penalty, max_new_tokens=60)
        chunks = run(collect(vllm_engine, job))
        return len(min(chunks, key=lambda chunk: chunk.index).tokens)

    assert best_length(10) > best_length(-10)


def test_beams_make_a_whole_answer(run: LoopThread, vllm_engine: Engine) -> None:
    """Every beam has its tokens with log probabilities that add up, and LMI's finish reason."""
    request, job = beams(details=True, top_n_tokens=2, max_new_tokens=40)
    ranked = rank_candidates(run(collect(vllm_engine, job)), request.candidates)
    result = format_result(request, PROMPT, ranked, LMI_SCHEMA)
    details = result["details"]
    assert len(details["best_of_sequences"]) == 2
    for sequence, chunk in zip(
        [details | result, *details["best_of_sequences"]], ranked, strict=True
    ):
        total = sum(token["logprob"] for token in sequence["tokens"])
        assert total == pytest.approx(chunk.cumulative_logprob, abs=1e-4)
        assert "".join(t["text"] for t in sequence["tokens"]) == sequence["generated_text"]
        assert sequence["generated_tokens"] == len(sequence["tokens"])
        assert sequence["finish_reason"] in ("length", "eos_token")
        assert all(len(top) == 2 and top[0]["text"] for top in sequence["top_tokens"])


def test_beams_of_adapters_and_base_keep_apart(run: LoopThread, vllm_engine: Engine) -> None:
    """Beam searches of the base and of an adapter, at once, are what each is alone."""
    loader = Loader(run, vllm_engine)
    adapter = loader.load(DEMO_ADAPTERS / "capitals")
    jobs = [beams()[1], beams(adapter)[1]]
    alone = [texts(run, vllm_engine, job) for job in jobs]
    assert alone[0] != alone[1]

    async def together() -> list[list[str]]:
        found = await asyncio.gather(*(collect(vllm_engine, job) for job in jobs))
        return [
            [chunk.text for chunk in sorted(chunks, key=lambda chunk: chunk.index)]
            for chunks in found
        ]

    assert run(together()) == alone
    loader.unload(adapter)


def test_beams_are_cancelled_with_their_consumer(run: LoopThread, vllm_engine: Any) -> None:
    """A client that disconnects ends every request of its beam search within a second."""

    async def scenario() -> None:
        _, job = beams(num_beams=4, max_new_tokens=1000, ignore_eos_token=True)
        task = asyncio.create_task(collect(vllm_engine, job))
        while vllm_engine.running_requests < 4:  # noqa: ASYNC110 (vLLM has no event)
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        deadline = time.monotonic() + 1
        while vllm_engine.running_requests and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert vllm_engine.running_requests == 0

    run(scenario())


def test_beams_stop_at_the_end_of_the_context(run: LoopThread, vllm_engine: Engine) -> None:
    """The last tokens of the context are used, and a prompt that fills it is refused."""
    length = vllm_engine.max_model_len
    sampling = {"max_tokens": 50, "temperature": 0.0}
    _, template = beams(num_beams=2, ignore_eos_token=True)
    job = GenerationJob("long", "moon " * 2 * length, sampling, beams=template.beams)
    with pytest.raises(PayloadError):
        run(collect(vllm_engine, job))
    cut = GenerationJob(
        "cut", "moon " * 3000, {**sampling, "ignore_eos": True}, beams=template.beams,
        truncate_prompt_tokens=length - 3,
    )  # fmt: skip
    assert {len(chunk.tokens) for chunk in run(collect(vllm_engine, cut))} == {3}
    full = GenerationJob(
        "full", "moon " * 3000, sampling, beams=template.beams, truncate_prompt_tokens=length
    )
    with pytest.raises(PayloadError, match="context length"):
        run(collect(vllm_engine, full))
