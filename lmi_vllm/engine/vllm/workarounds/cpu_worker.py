"""vLLM's CPU worker with what works around its defects in force.

Named by `worker_cls`, vLLM's own way to replace the worker: it reaches workers however their
processes start. It applies the rows of `WORKAROUNDS` that belong to a worker.

And one of its own: every pipeline stage but the first finds its input in buffers that a warm-up of
vLLM makes, and without compilation there is no warm-up: the engine dies at the first request (seen
with vLLM 0.32, integration/parallel_ranks.py). Here they are made with the model.

Blocks of the KV cache are cleared in every attention layer (see `not_finite`): vLLM's way passes
over those with a window.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from lmi_vllm.engine.vllm import workarounds


class GuardedCpuWorker(CPUWorker):  # type: ignore[misc,unused-ignore]
    """CPUWorker that compiles nothing while it serves and keeps requests apart under LoRA."""

    def init_device(self) -> None:
        """As CPUWorker.init_device; then works around what the worker's process needs."""
        super().init_device()
        workarounds.apply(workarounds.Scope.WORKER)
        if self.vllm_config.lora_config is not None:
            workarounds.apply(workarounds.Scope.LORA_WORKER)
        self.model_runner._zero_block_ids = self._clear_blocks

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

    def _clear_blocks(self, blocks: Sequence[int]) -> None:
        caches = (one for one in self.model_runner.kv_caches if isinstance(one, torch.Tensor))
        chosen = torch.tensor(blocks)
        for cache in {one.data_ptr(): one for one in caches}.values():
            cache[chosen] = 0
