"""How the engine runs the model: devices and batches."""

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import (
    Section,
    computes,
    maps_to,
    no_effect,
    option,
    warns,
)


class Parallel(Section):
    """The devices and the number of copies of the model."""

    section = "Devices and copies"

    # fmt: off
    tensor_parallel_degree: int | str = option(parse.parallel_degree,
        computes("tensor_parallel_size"), aliases=("tensor_parallel_size",), default="max",
        values="number, max", note="GPUs that share one copy of the model. `max` divides "
        "all visible GPUs by the pipeline degree; at most what the model's heads divide by.")
    pipeline_parallel_degree: int = option(parse.pipeline_degree,
        computes("pipeline_parallel_size"), aliases=("pipeline_parallel_size",), default=1,
        values="number", note="Stages one copy of the model is cut into.")
    data_parallel_size: int | None = option(parse.as_vllm, computes("data_parallel_size"),
        values="number", note="Copies of the model. Unset means as many as the GPUs allow, and "
        "one with LoRA.")
    device_ids: list[int | str] | None = option(parse.as_vllm, maps_to("device_ids"), values="list",
        note="The physical GPUs to use.")
    enable_expert_parallel: bool | None = option(parse.as_vllm, maps_to("enable_expert_parallel"),
        values="bool", note="Spread experts instead of slicing each.")
    device: str | None = option(parse.any_text, warns("vLLM finds the device itself"))
    # fmt: on


class Batching(Section):
    """The size of batches, and the memory for them."""

    section = "Batching, memory and speed"

    # fmt: off
    max_rolling_batch_size: int = option(parse.positive_int, maps_to("max_num_seqs"),
        aliases=("max_num_seqs",), default=256, values="number >= 1",
        note="Sequences the engine runs at once, per copy.")
    max_rolling_batch_prefill_tokens: int | None = option(parse.positive_human_int,
        maps_to("max_num_batched_tokens"), aliases=("max_num_batched_tokens",), values="tokens",
        note="Tokens the engine computes in one step.")
    gpu_memory_utilization: float | None = option(parse.fraction, maps_to("gpu_memory_utilization"),
        values="0 < x <= 1", note="Share of GPU memory that the engine takes. Unset means "
        "vLLM's own default.")
    cpu_offload_gb_per_gpu: float = option(parse.gigabytes, maps_to("cpu_offload_gb"),
        aliases=("cpu_offload_gb",), default=0.0, values="GB",
        note="Weights kept in host memory for each GPU. It has no effect on a CPU.")
    enforce_eager: bool | None = option(parse.boolean, maps_to("enforce_eager"), values="bool",
        note="true turns CUDA graphs off: a faster start, and slower tokens.")
    enable_chunked_prefill: bool | None = option(parse.boolean, maps_to("enable_chunked_prefill"),
        values="bool", note="Unset: the engine decides, normally on.")
    enable_prefix_caching: bool | None = option(parse.boolean, maps_to("enable_prefix_caching"),
        values="bool", note="Reuse the KV cache of equal prompt beginnings.")
    disable_sliding_window: bool | None = option(parse.boolean, maps_to("disable_sliding_window"),
        values="bool", note="Cap the context at the sliding window.")
    limit_mm_per_prompt: dict[str, object] | None = option(parse.modality_limits,
        maps_to("limit_mm_per_prompt"), values='`{"image": 4}` or `image=4`',
        note="Images, videos or sounds allowed in one prompt.")
    rolling_batch: str = option(parse.any_text, no_effect(), default="auto",
        values="auto, vllm, disable", note="Kept for LMI's sake: continuous batching is always on.")
    batch_size: str | None = option(parse.any_text,
        warns("continuous batching is always on", quiet_for=("1",)))
    # fmt: on
