"""What only the real engine can show: both lanes agree, its death is noticed, traps are refused."""

import asyncio
import json
import multiprocessing
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import ConfigurationError, EngineDeadError, EngineStartError, PayloadError
from lmi_vllm.inference.lmi_lane import make_job
from lmi_vllm.inference.request.lmi import parse_lmi_request
from lmi_vllm.inference.request.parameters import parse_parameters
from lmi_vllm.inference.request.sampling import sampling_fields
from lmi_vllm.messages import GenerationChunk, GenerationJob, OpenAICall, ServingProfile
from tests.contract.conftest import LoopThread, collect, start_demo_engine

pytestmark = pytest.mark.vllm
PROMPT = "Once upon a time"

# LMI parameters -> the same wish in OpenAI's words.
SAME_WISHES = {
    "greedy": ({}, {"temperature": 0}),
    "seeded": (
        {"do_sample": True, "temperature": 0.9, "seed": 7},
        {"temperature": 0.9, "seed": 7},
    ),
    "top-p": (
        {"temperature": 1.2, "top_p": 0.7, "seed": "11"},
        {"temperature": 1.2, "top_p": 0.7, "seed": 11},
    ),
    "top-k-off": (
        {"temperature": 1.0, "top_k": -1, "seed": 3},
        {"temperature": 1.0, "top_k": 0, "seed": 3},
    ),
    "min-p": (
        {"do_sample": True, "min_p": 0.2, "seed": 5},
        {"temperature": 1.0, "min_p": 0.2, "seed": 5},
    ),
    "stop": ({"stop_sequences": ["boat"]}, {"temperature": 0, "stop": ["boat"]}),
    "stop-kept": (
        {"stop": "boat", "include_stop_str_in_output": True},
        {"temperature": 0, "stop": "boat", "include_stop_str_in_output": True},
    ),
    "repetition": ({"repetition_penalty": 1.5}, {"temperature": 0, "repetition_penalty": 1.5}),
    "presence": ({"presence_penalty": 1.5}, {"temperature": 0, "presence_penalty": 1.5}),
    "min-tokens": (
        {"min_new_tokens": 25, "max_new_tokens": 28, "ignore_eos_token": True},
        {"temperature": 0, "min_tokens": 25, "max_tokens": 28, "ignore_eos": True},
    ),
    "logit-bias": (
        {"logit_bias": {"300": 60}},
        {"temperature": 0, "logit_bias": {"300": 60}},
    ),
    "truncate": (
        {"truncate": 3},
        {"temperature": 0, "truncate_prompt_tokens": 3},  # its own side keeps the BOS token
    ),
    "regex": (
        {"guided_regex": "[0-9]{3}"},
        {"temperature": 0, "structured_outputs": {"regex": "[0-9]{3}"}},
    ),
    "top-k": (
        {"temperature": 1.3, "top_k": 5, "seed": 2},
        {"temperature": 1.3, "top_k": 5, "seed": 2},
    ),
    "model's own sampling": ({"do_sample": True, "seed": 9}, {"seed": 9}),
    "frequency": ({"frequency_penalty": 1.9}, {"temperature": 0, "frequency_penalty": 1.9}),
    "all penalties, sampled": (
        {
            "temperature": 1.1, "repetition_penalty": 1.3, "presence_penalty": 0.5,
            "frequency_penalty": 0.5, "seed": 21,
        },
        {
            "temperature": 1.1, "repetition_penalty": 1.3, "presence_penalty": 0.5,
            "frequency_penalty": 0.5, "seed": 21,
        },
    ),
    "stop-token": ({"stop_token_ids": [303]}, {"temperature": 0, "stop_token_ids": [303]}),
    "several stops": (
        {"stop_sequences": ["harbour", "lived"], "stop": "boat that"},
        {"temperature": 0, "stop": ["harbour", "lived", "boat that"]},
    ),
    "bad-words": ({"bad_words": ["boat"]}, {"temperature": 0, "bad_words": ["boat"]}),
    "allowed": (
        {"allowed_token_ids": [300, 301, 302], "ignore_eos_token": True},
        {"temperature": 0, "allowed_token_ids": [300, 301, 302], "ignore_eos": True},
    ),
    "special tokens": (
        {"skip_special_tokens": False, "ignore_eos_token": True, "max_new_tokens": 60},
        {"temperature": 0, "skip_special_tokens": False, "ignore_eos": True, "max_tokens": 60},
    ),
    "long": ({"max_new_tokens": 400}, {"temperature": 0, "max_tokens": 400}),
    "n": (
        {"n": 3, "temperature": 1.4, "seed": 13},
        {"n": 3, "temperature": 1.4, "seed": 13},
    ),
    "best_of": (
        {"best_of": 2, "top_p": 0.9, "temperature": 1.4, "seed": 14},
        {"n": 2, "top_p": 0.9, "temperature": 1.4, "seed": 14},
    ),
    "beams": (
        {"num_beams": 3, "length_penalty": 2},
        {"temperature": 0, "use_beam_search": True, "n": 3, "length_penalty": 2},
    ),
    "schema": (
        {"guided_json": {"enum": ["red", "green"]}},
        {"temperature": 0, "structured_outputs": {"json": {"enum": ["red", "green"]}}},
    ),
    "choice": (
        {"guided_choice": ["north", "south"]},
        {"temperature": 0, "structured_outputs": {"choice": ["north", "south"]}},
    ),
}  # fmt: skip


async def _lmi_tokens(engine: Engine, parameters: dict[str, object]) -> list[list[int]]:
    request = parse_lmi_request({"inputs": PROMPT, "parameters": parameters}, ServingProfile())
    chunks = await collect(engine, make_job(request, "lane", 0, None))
    return [[token.id for token in chunk.tokens] for chunk in sorted(chunks, key=_index)]


def _index(chunk: GenerationChunk) -> int:
    return chunk.index


async def _openai_tokens(engine: Engine, fields: dict[str, object]) -> list[list[int]]:
    body = {"prompt": PROMPT, "max_tokens": 30, "return_token_ids": True, **fields}
    reply = await engine.answer_openai(OpenAICall("completions", body, {}, "lane"))
    assert reply.status == 200, reply.body
    return [choice["token_ids"] for choice in orjson.loads(reply.body)["choices"]]


@pytest.mark.parametrize("wish", SAME_WISHES)
def test_lanes_give_the_same_tokens(run: LoopThread, vllm_engine: Engine, wish: str) -> None:
    """The LMI lane and vLLM's completion handler answer the same wish with the same tokens."""
    parameters, fields = SAME_WISHES[wish]
    ours = run(_lmi_tokens(vllm_engine, parameters))
    theirs = run(_openai_tokens(vllm_engine, fields))
    if "use_beam_search" in fields:  # vLLM's handler leaves the end token out
        end = 1
        ours = [[token for token in sequence if token != end] for sequence in ours]
        theirs = [[token for token in sequence if token != end] for sequence in theirs]
    assert ours == theirs
    assert all(ours)


@pytest.mark.parametrize("most", [1, 2, 5, 500])
@pytest.mark.parametrize("repeated", [1, 400], ids=["short", "long"])
def test_truncated_prompt_keeps_its_first_token(
    run: LoopThread, vllm_engine: Engine, most: int, repeated: int
) -> None:
    """The BOS token and the last tokens after it, also of a text that is cut before it is read."""
    text = "No one knows the name of the king. " * repeated
    job = GenerationJob("cut", text, truncate_prompt_tokens=most)
    jobs = vllm_engine._jobs  # type: ignore[attr-defined]
    found = run(jobs._render(job))["prompt_token_ids"]
    bos, *others = [one.id for one in run(vllm_engine.tokenize(text, add_special_tokens=True))]
    assert found == [bos, *others[max(len(others) - most + 1, 0) :]]
    assert len(found) == min(most, len(others) + 1)


def test_sampling_fields_are_vllm_s(vllm_engine: Engine) -> None:
    """Every field the parameters can become is one of vLLM's SamplingParams."""
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415 (needs vLLM)

    everything = {
        "max_new_tokens": 1, "min_new_tokens": 1, "temperature": 1.0, "top_k": 1, "top_p": 0.5,
        "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "seed": 1, "stop": "x", "stop_token_ids": [1],
        "include_stop_str_in_output": True, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "ignore_eos_token": True, "bad_words": ["x"],
        "allowed_token_ids": [1], "prompt_logprobs": 1, "logit_bias": {"1": 1.0},
        "guided_regex": "x",
    }  # fmt: skip
    fields = sampling_fields(parse_parameters(everything))
    assert set(fields) <= set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 4, "logprobs": 500},
        {"max_tokens": 4, "temperature": -1.0},
        {"max_tokens": 4, "structured_outputs": {"grammar": "this is no grammar ::= ("}},
        {"max_tokens": 4, "allowed_token_ids": [10**6]},
    ],
    ids=["logprobs", "temperature", "grammar", "token-id"],
)
def test_generate_refused_value_is_client_fault(
    run: LoopThread, vllm_engine: Engine, sampling: dict[str, object]
) -> None:
    """What vLLM refuses about a request is the client's fault, and the engine lives on."""
    with pytest.raises(PayloadError):
        run(collect(vllm_engine, GenerationJob("bad", PROMPT, sampling)))
    run(vllm_engine.check_health())


def test_openai_faults_are_replies_in_vllm_s_shape(run: LoopThread, vllm_engine: Engine) -> None:
    """A malformed body, a refused value and an unknown model come back as vLLM's error objects."""
    for body, status in (
        ({"prompt": 3.5}, 400),
        ({"prompt": "x", "temperature": -3}, 400),
        ({"prompt": "x", "model": "nobody"}, 404),
        ({"prompt": "moon " * 5000}, 400),
    ):
        reply = run(vllm_engine.answer_openai(OpenAICall("completions", body, {}, "bad")))
        assert reply.status == status
        assert orjson.loads(reply.body)["error"]["code"] == status


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("completions", {"prompt": None}),
        ("completions", {}),
        ("chat/completions", {"messages": None}),
        ("chat/completions", {"messages": [None]}),
        ("chat/completions", {"messages": 5}),
    ],
)
def test_body_that_crashes_a_vllm_validator_is_a_client_error(
    run: LoopThread, vllm_engine: Engine, kind: str, body: dict[str, object]
) -> None:
    """Some raise what pydantic does not wrap; the answer is 400, too (found by chaos)."""
    reply = run(vllm_engine.answer_openai(OpenAICall(kind, body, {}, "null")))
    assert reply.status == 400
    assert orjson.loads(reply.body)["error"]["code"] == 400


def test_steps_are_counted_without_a_stream(run: LoopThread, vllm_engine: Engine) -> None:
    """A request that gets one chunk at its end shows progress all the while (stall detection)."""
    before = vllm_engine.progress
    job = GenerationJob("steps", PROMPT, {"max_tokens": 20, "ignore_eos": True})
    run(collect(vllm_engine, job))
    assert vllm_engine.progress - before >= 20


class ReapedElsewhere(multiprocessing.get_context("spawn").Process):  # type: ignore[misc,name-defined]
    """A process that another thread is reaping: `join` returns at once, and it counts as alive."""

    looks = 0

    def join(self, timeout: float | None = None) -> None:
        """Find out nothing, as `waitpid` in the second of two threads."""

    def is_alive(self) -> bool:
        """Say so of an ended process, too, until the other thread has noted its end."""
        self.looks += 1
        return super().is_alive() or self.looks < 5


def test_engine_that_another_thread_reaps_has_ended() -> None:
    """Else the server ends, though its engine could be replaced."""
    from lmi_vllm.engine.vllm.async_llm import GuardedAsyncLLM  # noqa: PLC0415 (imports vLLM)

    process = ReapedElsewhere(target=time.sleep, args=(600,))
    process.start()
    manager = SimpleNamespace(processes=[process])
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    assert GuardedAsyncLLM.kill(SimpleNamespace(engine_core=core), 20.0)  # type: ignore[arg-type]
    assert process.exitcode == -signal.SIGKILL


async def test_engine_is_killed_though_the_loop_has_no_free_thread() -> None:
    """Sources of adapters that hang may hold them all."""
    from lmi_vllm.engine.vllm.engine import VllmClient  # noqa: PLC0415 (imports vLLM)

    come_back, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    held = asyncio.create_task(asyncio.to_thread(come_back.wait, 60))
    await asyncio.sleep(0.01)
    llm = SimpleNamespace(kill=lambda _: True, errored=True)

    async def wait_until_dead() -> None:
        """Return at once: it is."""

    client: Any = SimpleNamespace(_llm=llm, wait_until_dead=wait_until_dead)
    try:
        assert await asyncio.wait_for(VllmClient.kill(client), 10)
    finally:
        come_back.set()
        await held


def test_engine_death_reaches_every_process(run: LoopThread, vllm_engine: Engine) -> None:
    """Killing the engine process ends what runs, what comes, and the wait for its death.

    Closed, it leaves no descriptor: vLLM leaves nine, which restarts would add up.
    """
    run(vllm_engine.check_health())  # what vLLM opens once is open
    descriptors = psutil.Process().num_fds()
    before = set(psutil.Process().children())
    engine = start_demo_engine(run)
    (child,) = set(psutil.Process().children()) - before

    async def scenario() -> None:
        job = GenerationJob(
            "dies", PROMPT, {"max_tokens": 1500, "ignore_eos": True}, is_streaming=True
        )
        chunks = engine.generate(job)
        await anext(chunks)
        child.suspend()
        assert engine.http is not None
        waiting = asyncio.create_task(engine.http.is_asleep())
        await asyncio.sleep(0.1)
        child.kill()
        with pytest.raises(EngineDeadError):
            async for _ in chunks:
                pass
        await asyncio.wait_for(engine.wait_until_dead(), 2)
        assert not await asyncio.wait_for(waiting, 1)  # vLLM leaves such a call without an answer
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine, job)
        with pytest.raises(EngineDeadError):
            await engine.answer_openai(OpenAICall("completions", {"prompt": "x"}, {}, "r"))
        await engine.close()

    run(scenario())
    assert psutil.Process().num_fds() == descriptors


def test_start_refuses_head_size_the_cpu_kernel_lacks(run: LoopThread, tmp_path: Path) -> None:
    """Head size 16 would kill the engine at its first request; the start says so instead."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineStartError, match="head size is 16"):
        start_demo_engine(run, model=str(folder))


def test_start_refuses_adapters_of_experts_on_a_cpu(run: LoopThread, tmp_path: Path) -> None:
    """LoRA layers of experts need Triton: the engine would start and give no token."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineStartError, match="enable_lora: the model is a mixture of experts"):
        start_demo_engine(run, model=str(folder))


def test_start_refuses_adapters_of_a_model_that_hears_on_a_cpu(
    run: LoopThread, tmp_path: Path
) -> None:
    """The first request with one would end the engine for all."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from tests.support.speech_model import whisper  # noqa: PLC0415 (imports torch)

    with pytest.raises(EngineStartError, match="enable_lora: the model is an encoder with a dec"):
        start_demo_engine(run, model=str(whisper(tmp_path / "model")), max_num_seqs=4)


def test_start_lists_every_refused_argument(run: LoopThread) -> None:
    """All arguments the installed vLLM refuses are named at once, in its words."""
    with pytest.raises(ConfigurationError) as refusal:
        start_demo_engine(run, dtype="bf17", max_num_seqs="many", no_such_argument=1)
    text = str(refusal.value)
    for words in ("bf17", "max_num_seqs", "no_such_argument"):
        assert words in text


def test_start_fits_context_to_kv_cache_and_says_so(
    run: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    """max_model_len=-1 takes the longest context whose KV cache fits, naming both lengths."""
    engine = start_demo_engine(run, max_model_len=-1, kv_cache_memory_bytes=1 << 20)
    assert 0 < engine.max_model_len < 2048
    (warning,) = [record for record in caplog.records if "own length" in record.getMessage()]
    assert "2048" in warning.getMessage()
    assert str(engine.max_model_len) in warning.getMessage()
    with pytest.raises(PayloadError):
        run(collect(engine, GenerationJob("long", "moon " * 1000, {"max_tokens": 4})))
    run(engine.close())


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"top_k": 2**64}, b"top_k: cannot be sent to the engine; an integer has at most 64 bits"),
        ({"session_id": "\ud800"}, b"session_id: cannot be sent to the engine"),
        ({"vllm_xargs": {"x": "\ud800"}}, b"vllm_xargs: cannot be sent to the engine"),
        ({"request_id": "\ud800"}, b"request_id: cannot be sent to the engine"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, b"kv_transfer_params: expected an object"),
        ({"vllm_xargs": {"ec_transfer_params": [1]}}, b"ec_transfer_params: expected an object"),
    ],
    ids=str,
)
def test_what_cannot_be_sent_is_refused_by_name_and_forgotten(
    run: LoopThread, vllm_engine: Engine, field: dict[str, object], said: bytes
) -> None:
    """VLLM kept such a request for ever, and answered 500 without a text."""
    states = vllm_engine._llm.output_processor.request_states  # type: ignore[attr-defined]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **field}
    reply = run(vllm_engine.answer_openai(OpenAICall("chat/completions", body, {}, "unsent")))
    assert reply.status == 400
    assert said in reply.body
    assert not states


def test_plain_vllm_keeps_a_request_that_cannot_be_sent(
    run: LoopThread, vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`unsent_requests`: vLLM's own method fails, and the request stays in its tables."""
    from vllm import SamplingParams  # noqa: PLC0415 (optional)
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 (optional)

    llm: Any = vllm_engine._llm  # type: ignore[attr-defined]
    monkeypatch.setattr(llm, "_add_request", partial(AsyncLLM._add_request, llm))
    with pytest.raises(OverflowError):
        run(AsyncLLM.add_request(llm, "kept", "x", SamplingParams(top_k=2**64)))
    assert len(llm.output_processor.request_states) == 1
    run(llm.abort("kept"))
    assert not llm.output_processor.request_states


def test_plain_vllm_reads_transfer_parameters_that_are_no_object(
    run: LoopThread, vllm_engine: Engine
) -> None:
    """`unsent_requests`: an error of Python's instead of one that names the field."""
    from vllm import SamplingParams  # noqa: PLC0415 (optional)
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 (optional)

    llm: Any = vllm_engine._llm  # type: ignore[attr-defined]
    params = SamplingParams(extra_args={"kv_transfer_params": "x"})
    with pytest.raises(AttributeError):
        run(AsyncLLM.add_request(llm, "read", "x", params))
    run(llm.abort("read"))
    assert not llm.output_processor.request_states
