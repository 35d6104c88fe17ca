"""Speculative decoding, chunked prefill and prefix caching, at work and without effect on answers.

One server on the embedded model has all three. Its counters and the steps that vLLM logs show that
drafts, chunks and cached blocks were used. Greedy tokens are those of a server without them.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from integration.client import call, wait_until
from integration.conftest import RunningServer, running_server
from integration.plain_model import plain_model

pytestmark = pytest.mark.vllm

CHUNK = 128  # prompt tokens in a step
FEATURES = {
    "speculative_config": json.dumps(
        {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    ),
    "enable_chunked_prefill": "true",
    "max_rolling_batch_prefill_tokens": str(CHUNK),
    "max_rolling_batch_size": "8",
    "enable_prefix_caching": "true",
    "block_size": "32",
    "cpu_offload_gb": "1",
    "enable_logging_iteration_details": "true",  # one line of the log for each step
    "tokenizer_mode": "slow",
    "record_acceptance_rate": "true",  # without effect: the rate is logged anyway
}
STORY = "Once upon a time"
ASKED = "The capital of France is"
ANSWER = " Paris. The city lies on the river Seine."  # its tokens have 0.98 at least
SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.01}, {"temperature": 0.1, "seed": 5}, {"temperature": 0.5, "top_p": 0.5},
    {"temperature": 0.1, "top_k": 5}, {"temperature": 0.1, "top_k": 5, "top_p": 0.9},
)  # fmt: skip
LIST = "The capital of France is Paris. The capital of Italy is Rome. " * 32


@pytest.fixture(scope="module")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model with every feature on."""
    model = plain_model(tmp_path_factory.mktemp("featured") / "model", **FEATURES)
    environ = {"LMI_STATS_INTERVAL": "2"}
    with running_server(model.parent, "--model", str(model), environ=environ) as server:
        yield server


def tokens(url: str, prompt: str, count: int = 24) -> list[int]:
    """Return the greedy tokens after `prompt`."""
    parameters = {"max_new_tokens": count, "do_sample": False, "details": True,
                  "ignore_eos_token": True}  # fmt: skip
    answer = call(url, "/invocations", {"inputs": prompt, "parameters": parameters})
    assert answer.status == 200, answer.body
    return [token["id"] for token in answer.json()["details"]["tokens"]]


def check_sampled_answers(url: str) -> None:
    """Assert that what a request sets for sampling holds for its drafts, and for other steps."""
    for sampling in SAMPLINGS:
        parameters = {"max_new_tokens": 30, "do_sample": True, **sampling}
        answer = call(url, "/invocations", {"inputs": ASKED, "parameters": parameters})
        assert answer.status == 200, answer.body
        assert answer.json()["generated_text"] == ANSWER, sampling


def counter(url: str, name: str) -> float:
    """Return the sum of one of vLLM's counters."""
    text = call(url, "/metrics").body.decode()
    values: list[Any] = re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    assert values, f"no {name}"
    return sum(map(float, values))


def prompt_steps(log: str) -> list[int]:
    """Return how many prompt tokens each step took that took any."""
    found = re.findall(r"Iteration\(\d+\): \d+ context requests, (\d+) context tokens", log)
    return [taken for taken in map(int, found) if taken]


def test_long_prompt_is_read_in_chunks(featured: RunningServer) -> None:
    """Step after step as many tokens as the budget allows, then the rest."""
    tokens_before = counter(featured.url, "vllm:prompt_tokens_total")
    tokens(featured.url, "A list that was never sent before. " * 32, 1)
    length = int(counter(featured.url, "vllm:prompt_tokens_total") - tokens_before)
    assert length > 2 * CHUNK
    steps = [CHUNK] * (length // CHUNK) + [length % CHUNK]

    def were_logged() -> bool:  # lines leave the engine's process in its own time
        return prompt_steps(featured.process.stderr)[-len(steps) :] == steps

    assert wait_until(were_logged, 20), prompt_steps(featured.process.stderr)


def test_answers_are_those_without_the_features(
    featured: RunningServer, demo_server: RunningServer
) -> None:
    """Drafted tokens are accepted; a prompt of several chunks answers alike, and is cached."""
    expected = tokens(demo_server.url, LIST)
    assert tokens(featured.url, LIST) == expected
    long = tokens(demo_server.url, STORY, 400)  # long enough to repeat itself
    assert tokens(featured.url, STORY, 400) == long
    assert counter(featured.url, "vllm:spec_decode_num_drafts_total") > 0
    assert counter(featured.url, "vllm:spec_decode_num_accepted_tokens_total") > 0
    hits = counter(featured.url, "vllm:prefix_cache_hits_total")
    assert tokens(featured.url, LIST) == expected
    assert counter(featured.url, "vllm:prefix_cache_hits_total") >= hits + 32


def test_sampled_answers_are_right_with_drafts(featured: RunningServer) -> None:
    """Whatever holds for sampling; a step without a draft does not end the engine."""
    check_sampled_answers(featured.url)


def test_named_tokens_do_not_end_an_engine_with_drafts(featured: RunningServer) -> None:
    """`cpu/scored_tokens`: their log probabilities are refused, and the next answer is there."""
    score = {"query": "The moon", "items": [" is"], "label_token_ids": [273, 302]}
    completion = {"prompt": "The moon", "logprobs": 1, "logprob_token_ids": [273, 302]}
    for path, body in (("/generative_scoring", score), ("/v1/completions", completion)):
        answer = call(featured.url, path, body)
        assert (answer.status, b"speculative decoding" in answer.body) == (400, True), answer.body
    assert tokens(featured.url, STORY, 4)


def test_acceptance_rate_is_logged(featured: RunningServer) -> None:
    """LMI_STATS_INTERVAL: how many drafts were right, beside throughput and queue."""
    parameters = {"max_new_tokens": 400, "do_sample": False, "ignore_eos_token": True}
    body = {"inputs": STORY, "parameters": parameters}  # long enough to repeat itself
    assert call(featured.url, "/invocations", body, seconds=240).status == 200

    def logged(kind: str) -> list[str]:
        messages = [str(each["message"]) for each in featured.process.log]
        return [text for text in messages if kind in text]

    def drafts() -> list[tuple[int, int, float]]:
        found = re.findall(
            r"Accepted: (\d+) tokens, Drafted: (\d+) tokens, .*acceptance rate: (\d+\.\d)%",
            "\n".join(logged("SpecDecoding metrics: ")),
        )
        return [(int(right), int(all_), float(rate)) for right, all_, rate in found]

    accepted = counter(featured.url, "vllm:spec_decode_num_accepted_tokens_total")
    assert accepted > 0
    assert wait_until(lambda: sum(right for right, _, _ in drafts()) == accepted, 40), drafts()
    for right, all_, rate in drafts():
        assert rate == pytest.approx(100 * right / all_, abs=0.06)
    queue = r"generation throughput: \d+\.\d tokens/s, Running: \d+ reqs, Waiting: \d+ reqs"
    assert re.search(queue, logged("generation throughput: ")[0])


def test_features_reach_vllm_s_arguments(featured: RunningServer) -> None:
    """The engine's own log line names the arguments; the old tokenizer mode is said to be gone."""
    log = featured.process.stderr
    assert "slow is gone from vLLM" in log
    assert "method='ngram'" in log
    assert "Chunked prefill is enabled with max_num_batched_tokens=128" in log
