"""vLLM's CPU worker without four of its traps (DECISIONS.md 41, 52, 56).

Under LoRA, vLLM 0.32 computes rows of the base model that share a step with an adapter's rows with
the adapter in the last slot: their index is -1. Here such rows stay as they were.

Under LoRA, vLLM 0.32 computes the logits of one request's prompt (n rows) with the adapter rows of
the whole step (one for each request). The numbers differ as soon as any other request shares the
step, and `einsum` ends the engine; where they happen to be equal, rows get another request's
adapter. Here each prompt is computed with the adapter row of its own request.

The first request that asks for log probabilities of more than the sampled token makes vLLM compile
a comparison with a C++ compiler, 5 to 25 s in which every stream stands still. Here it is not
compiled: it is three tensor operations.

Every pipeline stage but the first finds its input in buffers that a warm-up of vLLM 0.32 makes, and
without compilation there is no warm-up: the engine dies at the first request. Here they are made
with the model.

Named by `worker_cls`, vLLM's own way to replace the worker: it reaches workers however their
processes start.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.sample import sampler
from vllm.v1.worker.cpu_worker import CPUWorker


class GuardedCpuWorker(CPUWorker):  # type: ignore[misc,unused-ignore]
    """CPUWorker that compiles nothing while it serves and keeps requests apart under LoRA."""

    def init_device(self) -> None:
        """As CPUWorker.init_device; then replaces what the head of this file names."""
        super().init_device()
        compiled = sampler.batched_count_greater_than
        plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        sampler.batched_count_greater_than = plain
        runner: Any = self.model_runner
        if self.vllm_config.lora_config is None:
            return
        leave_base_rows_alone()
        if self.vllm_config.use_v2_model_runner:  # has no such method: `generate` refuses
            return
        compute = runner._get_prompt_logprobs_dict

        def one_by_one(hidden_states: Any, scheduled: dict[str, int]) -> dict[str, Any]:
            waiting = runner.num_prompt_logprobs
            done: dict[str, Any] = {}
            try:
                for request_id in list(waiting):
                    runner.num_prompt_logprobs = own = {request_id: waiting[request_id]}
                    with _own_adapter(runner, request_id):
                        done |= compute(hidden_states, scheduled)
                    if not own:  # its prompt is complete
                        del waiting[request_id]
            finally:
                runner.num_prompt_logprobs = waiting
            return done

        runner._get_prompt_logprobs_dict = one_by_one

    def load_model(self, *args: Any, **named: Any) -> None:
        """As CPUWorker.load_model; then makes what a later pipeline stage finds its input in."""
        super().load_model(*args, **named)
        runner: Any = self.model_runner
        if get_pp_group().is_first_rank or getattr(runner, "intermediate_tensors", 0) is not None:
            return
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )


def leave_base_rows_alone() -> None:
    """Let the LoRA operations on CPU pass over rows without an adapter; may be called twice."""
    for name in ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink"):
        masked = _of_adapter_rows(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, masked)


def _of_adapter_rows(operation: Callable[..., None]) -> Callable[..., None]:
    """Return the operation, which changes rows of its third argument, for rows with an adapter."""
    if hasattr(operation, "_passes_over_base_rows"):
        return operation

    @functools.wraps(operation)
    def masked(inputs: Any, weights: Any, output: Any, rows: Any, *more: Any, **named: Any) -> None:
        is_base = rows < 0
        if not is_base.any():
            operation(inputs, weights, output, rows, *more, **named)
            return
        if is_base.all():
            return
        # Put back rather than multiplied by zero: the weights in the last slot may be infinite.
        is_base = is_base[: output.shape[0]]
        kept = output[is_base]
        operation(inputs, weights, output, rows, *more, **named)
        output[is_base] = kept

    masked._passes_over_base_rows = True  # type: ignore[attr-defined]
    return masked


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
