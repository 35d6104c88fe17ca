"""vLLM's CPU worker with what works around its defects in force.

Named by `worker_cls`, vLLM's own way to replace the worker: it reaches workers however their
processes start. It applies the rows of `WORKAROUNDS` that belong to a worker, counts the requests
whose logits are not finite as the model gave them, and clears blocks of the KV cache in every
attention layer, where vLLM passes over those with a window (see `not_finite` for both).

And one of its own: every pipeline stage but the first finds its input in buffers that a warm-up of
vLLM makes, and without compilation there is no warm-up. Here they are made with the model.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: with pipeline stages on a CPU, the engine ends at the first request.
May go: when integration/parallel_ranks.py and the tests of `not_finite` hold without it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.workarounds.not_finite import row_for_each


class GuardedCpuWorker(CPUWorker):  # type: ignore[misc,unused-ignore]
    """CPUWorker that compiles nothing while it serves and keeps requests apart under LoRA."""

    _rows: Any = None  # of this step's requests, NaN where the model gave numbers of no use

    def init_device(self) -> None:
        """As CPUWorker.init_device; then works around what the worker's process needs."""
        super().init_device()
        workarounds.apply(workarounds.Scope.WORKER)
        if self.vllm_config.lora_config is not None:
            workarounds.apply(workarounds.Scope.LORA_WORKER)
        self.model_runner._zero_block_ids = self._clear_blocks
        is_v2 = getattr(self.vllm_config, "use_v2_model_runner", False)  # it counts otherwise
        if not is_v2:
            self._count_of_requests(self.model_runner)

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

    def sample_tokens(self, *arguments: Any) -> Any:
        """As CPUWorker.sample_tokens; grammars and sampling write into the logits."""
        runner: Any = self.model_runner
        state: Any = getattr(runner, "execute_model_state", None)
        logits = self._rows = getattr(state, "logits", None)  # the second runner has none there
        if logits is not None:
            drafts = state.scheduler_output.scheduled_spec_decode_tokens
            self._rows = row_for_each(runner.input_batch.req_ids, drafts, logits)
        return super().sample_tokens(*arguments)

    def _count_of_requests(self, runner: Any) -> None:
        given = runner._bookkeeping_sync

        def counted(scheduled: Any, sampled: Any, logits: Any, *more: Any) -> Any:
            # They are read for the count alone.
            return given(scheduled, sampled, None if logits is None else self._rows, *more)

        runner._bookkeeping_sync = counted

    def _clear_blocks(self, blocks: Sequence[int]) -> None:
        caches = (one for one in self.model_runner.kv_caches if isinstance(one, torch.Tensor))
        chosen = torch.tensor(blocks)
        for cache in {one.data_ptr(): one for one in caches}.values():
            cache[chosen] = 0
