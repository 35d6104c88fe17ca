"""What an engine over a text model imports: once before the forks, each engine is spared it.

A release that has none of these names, or others, makes the tests slower and nothing else.
"""

import contextlib
import importlib

ENGINE_MODULES = (
    "lmi_vllm.engine.vllm.engine", "lmi_vllm.engine.vllm.cpu.worker",
    "vllm.distributed.elastic_ep.elastic_execute", "vllm.lora.punica_wrapper.punica_cpu",
    "vllm.model_executor.layers.quantization.online.base", "vllm.triton_utils.dispatcher",
    "vllm.v1.pool.flash_maxsim",
)  # fmt: skip


def import_engine_modules() -> None:
    """Import those of them that the installed release has."""
    for module in ENGINE_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
