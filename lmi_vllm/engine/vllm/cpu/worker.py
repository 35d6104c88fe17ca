"""vLLM's CPU worker with the workarounds for its defects.

`worker_cls` names it. That is vLLM's own way to replace the worker, however processes start. The
worker applies the rows of `WORKAROUNDS` for workers. It counts the requests whose logits are not
finite as the model gives them. It clears blocks of the KV cache in every attention layer, where
vLLM skips layers with a window (see `not_finite` for both). Files in a container's memory are free
memory (`file_memory`).

It also has a workaround of its own. Every pipeline stage but the first reads its input from buffers
that vLLM's warm-up makes. Without compilation there is no warm-up, so they are made with the model.

The file by which ranks meet is put beside vLLM's sockets, in the folder that this server removes. A
killed engine leaves it in the folder for temporary files otherwise.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: with pipeline stages on a CPU, the engine ends at the first request.
May go: when test_two_ranks_answer_as_one and the tests of `not_finite` hold without it.
"""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Final

import torch
import vllm.envs as vllm_settings
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from lmi_vllm.engine.vllm import workarounds
from lmi_vllm.engine.vllm.cache_size import CacheSize
from lmi_vllm.engine.vllm.cpu.file_memory import (
    kv_cache_bytes,
    share_of_container,
    step_bytes,
)
from lmi_vllm.engine.vllm.processes import workers_here
from lmi_vllm.engine.vllm.workarounds.not_finite import requests_not_finite
from lmi_vllm.host_memory import free_host_memory

_FILE: Final = "file://"  # of the ranks of one node; those of several meet at an address


class GuardedCpuWorker(CPUWorker):  # type: ignore[misc,unused-ignore]
    """CPUWorker that compiles nothing while it serves and keeps requests apart under LoRA."""

    def __init__(self, vllm_config: Any, *args: Any, **named: Any) -> None:
        with share_of_container(vllm_config.cache_config):
            super().__init__(vllm_config, *args, **named)

    def init_device(self) -> None:
        """As CPUWorker.init_device; then works around what the worker's process needs."""
        worker: Any = self
        meeting = str(worker.distributed_init_method)
        if meeting.startswith(_FILE):
            path = PurePath(vllm_settings.VLLM_RPC_BASE_PATH, PurePath(meeting).name)
            worker.distributed_init_method = f"{_FILE}{path}"
        workarounds.apply(workarounds.Scope.RANKS)
        super().init_device()
        workarounds.apply(workarounds.Scope.WORKER)
        if self.vllm_config.lora_config is not None:
            workarounds.apply(workarounds.Scope.LORA_WORKER)

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

    def determine_available_memory(self) -> int:
        """As CPUWorker.determine_available_memory; files in a container's memory are free."""
        worker: Any = self
        given = self.vllm_config.cache_config.kv_cache_memory_bytes
        determine = super().determine_available_memory
        ranks = workers_here()
        step = step_bytes(self.vllm_config)
        size = kv_cache_bytes(determine, given, worker.requested_cpu_memory, ranks, step)
        CacheSize(size, (free_host_memory() or 0) // ranks).note()
        return size

    @torch.inference_mode()
    def execute_model(self, scheduled: Any) -> Any:
        """As CPUWorker.execute_model, after the step's new blocks were cleared in every layer."""
        if scheduled.new_block_ids_to_zero:
            self._clear_blocks(scheduled.new_block_ids_to_zero)
        return super().execute_model(scheduled)

    def sample_tokens(self, *arguments: Any) -> Any:
        """As CPUWorker.sample_tokens, with a count of the requests whose logits are not finite.

        They are looked at before grammars and sampling write into them.
        """
        runner: Any = self.model_runner
        state: Any = getattr(runner, "execute_model_state", None)
        logits = getattr(state, "logits", None)  # the second runner has none there: vLLM counts
        if logits is None:
            return super().sample_tokens(*arguments)
        drafts = state.scheduler_output.scheduled_spec_decode_tokens
        not_finite = requests_not_finite(runner.input_batch.req_ids, drafts, logits)
        output = super().sample_tokens(*arguments)
        output.num_nans_in_logits = dict.fromkeys(not_finite, 1)
        return output

    def _clear_blocks(self, blocks: Sequence[int]) -> None:
        caches = (one for one in self.model_runner.kv_caches if isinstance(one, torch.Tensor))
        chosen = torch.tensor(blocks)
        for cache in {one.data_ptr(): one for one in caches}.values():
            cache[chosen] = 0
