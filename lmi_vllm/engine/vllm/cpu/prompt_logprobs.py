"""Prompt log probabilities beside any other request under LoRA on a CPU (DECISIONS.md 41).

`GPUModelRunner._get_prompt_logprobs_dict` computes the logits of one request's prompt (n rows) with
the adapter rows of the whole step (one for each request). Here each prompt is computed by itself,
with the adapter row of its own request. Model runner V2 has no such method: `generate` refuses.

Upstream: https://github.com/vllm-project/vllm/issues/16668.
Releases: 0.31 and later, with model runner V1.
Shows: numbers that differ as soon as another request shares the step; where the shapes do not
    agree `einsum` raises inside the step, and the engine ends.
May go: when test_plain_vllm_mixes_prompt_logprobs_of_a_batch fails.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def one_by_one(compute: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return the method for all requests of a step, as one call of `compute` for each."""

    def compute_one_by_one(
        runner: Any, hidden_states: Any, scheduled: dict[str, int]
    ) -> dict[str, Any]:
        waiting = runner.num_prompt_logprobs
        done: dict[str, Any] = {}
        try:
            for request_id in list(waiting):
                runner.num_prompt_logprobs = own = {request_id: waiting[request_id]}
                with _own_adapter(runner, request_id):
                    done |= compute(runner, hidden_states, scheduled)
                if not own:  # its prompt is complete
                    del waiting[request_id]
        finally:
            runner.num_prompt_logprobs = waiting
        return done

    return compute_one_by_one


@contextlib.contextmanager
def _own_adapter(runner: Any, request_id: str) -> Iterator[None]:
    """Let the sampler's adapter rows be one row, that of the request, which broadcasts."""
    row = runner.input_batch.req_id_to_index.get(request_id)
    if row is None:  # preempted: vLLM computes nothing for it in this step
        yield
        return
    first_token = runner.query_start_loc.np[row].item()
    changed = []
    manager = runner.lora_manager._adapter_manager
    for wrapper in manager.punica_wrapper_mapping.values():
        rows, lengths = wrapper._sampler_indices, wrapper.indices_len
        if lengths[1]:
            changed.append((rows, lengths, rows[0].clone(), lengths[1]))
            rows[0], lengths[1] = wrapper._token_lora_indices[first_token], 1
    try:
        yield
    finally:
        for rows, lengths, first, length in changed:
            rows[0], lengths[1] = first, length
