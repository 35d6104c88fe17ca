"""The lane between vLLM's own decoder and processor, step by step and without an engine."""

import inspect
import random
import time
from typing import Any, Final

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.chunks import ChunkMaker
from lmi_vllm.engine.vllm.outputs import EngineOutputs
from lmi_vllm.features.token_lane.lane import PlainLane
from lmi_vllm.messages import GenerationChunk, GenerationJob
from tests.contract.test_direct_tokens import Reader, flat

pytestmark = pytest.mark.vllm
STEPS: Final = 60
# Log probabilities, stop strings, and the most tokens of a step.
FORMS: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "plain": ({}, 1),
    "log probabilities": ({"logprobs": 0}, 1),
    "drafts": ({"logprobs": 0}, 3),
    "stop string": ({"stop": [" a", "e w"]}, 2),
    "special tokens": ({"skip_special_tokens": False, "logprobs": 0}, 1),
}


class Kept(Reader):
    """Keeps chunks, outside of any task."""

    def read_chunk(self, chunk: GenerationChunk) -> None:
        """Keep the chunk."""
        self.chunks.append(chunk)


# What a step is read with from 0.32 on.
TAKEN = inspect.signature(OutputProcessor.process_outputs).parameters
VERSION: Final = {"weight_version": None} if "weight_version" in TAKEN else {}
TOKENIZER: Final = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)


def messages(seed: int, most: int, *, has_logprobs: bool) -> list[list[bytes]]:
    """Return what an engine would send of one sequence, its first token and its end included."""
    chance, encoder, found = random.Random(seed), MsgpackEncoder(), []
    for step in range(STEPS):
        ids = [chance.randrange(len(TOKENIZER)) for _ in range(chance.randint(1, most))]
        logprobs = None
        if has_logprobs:
            values = -np.array([[chance.random()] for _ in ids], np.float32)
            ranks = np.ones(len(ids), np.int64)
            logprobs = LogprobsLists(np.array([[one] for one in ids], np.int32), values, ranks)
        end = FinishReason.LENGTH if step == STEPS - 1 else None
        output = EngineCoreOutput("request", ids, new_logprobs=logprobs, finish_reason=end)
        message = EngineCoreOutputs(outputs=[output], timestamp=100.0 + step)
        found.append([bytes(frame) for frame in encoder.encode(message)])
    return found


class Lane(PlainLane):
    """Counts the outputs that it takes."""

    taken = 0

    def take(self, outputs: list[Any], *rest: Any) -> list[Any]:
        """Take what the lane takes."""
        left = super().take(outputs, *rest)
        self.taken += len(outputs) - len(left)
        return left


def said(
    seed: int, sampling: dict[str, Any], most: int, interval: int = 1, *, has_lane: bool
) -> tuple[Any, ...]:
    """Return what a stream's reader gets, what vLLM keeps and counts, and what the lane took.

    The reader is busy now and then, and reads later what waits for it. The rest are the
    texts of the chunks, the number of chunks that it got directly, and of outputs vLLM did not see.
    """
    chance = random.Random(seed)
    params = SamplingParams(
        max_tokens=STEPS * most, output_kind=RequestOutputKind.DELTA, skip_clone=True, **sampling
    )
    request = EngineCoreRequest(
        request_id="request", prompt_token_ids=[1, 300], mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip
    request.external_req_id = "request"
    lane, decoder = Lane(TOKENIZER), MsgpackDecoder(EngineCoreOutputs)
    processor = EngineOutputs.of(
        OutputProcessor(TOKENIZER, log_stats=True, stream_interval=interval),
        lane if has_lane else None,
    )
    if has_lane:
        lane.read_messages(decoder)
    job = GenerationJob("request", "x", sampling, is_streaming=True)
    chunks = ChunkMaker(job, TOKENIZER, frozenset(TOKENIZER.all_special_ids))
    reader, queue = Kept(), RequestOutputCollector(params.output_kind, "request")
    with processor.in_lane(job, chunks, reader):
        processor.add_request(request, "x", None, 0, queue)
    state = processor.request_states["request"]
    counted, latencies, direct = 0, [], 0
    for frames in messages(seed, most, has_logprobs="logprobs" in sampling):
        message, stats, before = decoder.decode(frames), IterationStats(), len(reader.chunks)
        processor.process_outputs(message.outputs, message.timestamp, stats, **VERSION)
        direct += len(reader.chunks) - before
        counted += stats.num_generation_tokens
        latencies += stats.inter_token_latencies_iter
        reader.is_first_over = False
        if chance.random() < 0.8 and (output := queue.get_nowait()) is not None:
            reader.chunks += [chunks.make(output, one) for one in output.outputs]
        reader.is_first_over = queue.output is None and bool(reader.chunks)
    if (output := queue.get_nowait()) is not None:
        reader.chunks += [chunks.make(output, one) for one in output.outputs]
    found = [chunk for chunk in reader.chunks if chunk.tokens or chunk.finish_reason]
    kept = (state.detokenizer.output_text, list(state.detokenizer.output_token_ids))
    texts = [chunk.text for chunk in found]
    return flat(found), kept, counted, latencies, texts, direct, lane.taken


@pytest.mark.parametrize("name", FORMS)
def test_steps_are_read_as_by_vllm(name: str) -> None:
    """Any tokens, in steps of one or more, for a reader that is busy now and then."""
    sampling, most = FORMS[name]
    direct = 0
    for seed in range(30):
        ours = said(seed, sampling, most, has_lane=True)
        assert ours[:4] == said(seed, sampling, most, has_lane=False)[:4], seed
        direct += ours[5]
    assert direct > 30 * STEPS * 0.1


@pytest.mark.parametrize("interval", [2, 7])
@pytest.mark.parametrize("name", FORMS)
def test_tokens_are_delivered_together_as_by_vllm(name: str, interval: int) -> None:
    """With `stream_interval`, for a reader that is busy now and then; stop strings are vLLM's."""
    sampling, most = FORMS[name]
    direct = taken = 0
    for seed in range(30):
        ours = said(seed, sampling, most, interval, has_lane=True)
        assert ours[:4] == said(seed, sampling, most, interval, has_lane=False)[:4], seed
        direct += ours[5]
        taken += ours[6]
    if name == "stop string":
        assert not taken
        return
    assert taken > 30 * STEPS * 0.7
    assert direct > 30 * STEPS * (most + 1) / 2 / interval * 0.1
