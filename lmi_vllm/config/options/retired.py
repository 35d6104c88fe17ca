"""Options of other backends, and arguments that vLLM has dropped."""

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import (
    DROPPED,
    OTHER_BACKENDS,
    Section,
    computes,
    maps_to,
    option,
    refuses,
    stands_in_for,
)


class OtherBackends(Section):
    """DeepSpeed, Accelerate, LMI-Dist, Neuron and TensorRT-LLM."""

    section = OTHER_BACKENDS

    # fmt: off
    max_tokens: int | None = option(parse.positive_human_int, stands_in_for("max_model_len", "it "
        "was DeepSpeed's prompt plus answer"), note="DeepSpeed.")
    enable_cuda_graph: bool | None = option(parse.boolean, computes("enforce_eager"),
        note="DeepSpeed. enforce_eager is its inverse.")
    n_positions: int | None = option(parse.positive_human_int,
        stands_in_for("max_model_len", "it was Neuron's sequence length"), note="Neuron.")
    load_split_model: bool | None = option(parse.boolean,
        refuses("this layout cannot be read; use the original Hugging Face checkpoint",
                quiet_for=(False,)),
        note="Neuron.")
    max_input_len: int | None = option(parse.positive_human_int, computes("max_model_len"),
        note="TensorRT-LLM. With max_output_len: max_model_len is the sum.")
    max_output_len: int | None = option(parse.positive_human_int, computes("max_model_len"),
        note="TensorRT-LLM. With max_input_len: max_model_len is the sum.")
    max_num_tokens: int | None = option(parse.positive_human_int,
        stands_in_for("max_num_batched_tokens", "it was TensorRT-LLM's step size"),
        note="TensorRT-LLM.")
    max_num_sequences: int | None = option(parse.positive_int, stands_in_for("max_num_seqs"),
        note="TensorRT-LLM. Sequences at once.")
    kv_cache_free_gpu_mem_fraction: float | None = option(parse.fraction,
        stands_in_for("gpu_memory_utilization", "it was a share of free memory, vLLM's is a share "
        "of all memory"), note="TensorRT-LLM.")
    tokens_per_block: int | None = option(parse.positive_int,
        stands_in_for("block_size", "it was TensorRT-LLM's block size"), note="TensorRT-LLM.")
    # fmt: on


class Dropped(Section):
    """What older vLLM releases took."""

    section = DROPPED

    # fmt: off
    disable_log_requests: bool | None = option(parse.boolean, computes("enable_log_requests"),
        note="enable_log_requests is its inverse.")
    rope_scaling: dict[str, object] | None = option(parse.json_object, computes("hf_overrides"),
        values="JSON", note="Folded into hf_overrides where that is unset.")
    rope_theta: float | None = option(parse.real_number, computes("hf_overrides"),
        note="Folded into hf_overrides where that is unset.")
    speculative_model: str | None = option(parse.plain_text, computes("speculative_config"),
        note="Becomes speculative_config where that is unset; [ngram] means the ngram method.")
    num_speculative_tokens: int | None = option(parse.positive_int, computes("speculative_config"),
        note="Becomes part of speculative_config.")
    ngram_prompt_lookup_max: int | None = option(parse.positive_int, computes("speculative_config"),
        note="Becomes part of speculative_config.")
    ngram_prompt_lookup_min: int | None = option(parse.positive_int, computes("speculative_config"),
        note="Becomes part of speculative_config.")
    guided_decoding_backend: str | None = option(parse.plain_text,
        computes("structured_outputs_config"), note="Becomes structured_outputs_config's backend.")
    override_pooler_config: dict[str, object] | None = option(parse.json_object,
        stands_in_for("pooler_config"), values="JSON", note="Older name of pooler_config.")
    collect_detailed_traces: list[str] | None = option(parse.as_vllm,
        maps_to("collect_detailed_traces"), is_lenient=True, values="model, worker, all",
        note="Older vLLM took any text; what is none of these counts as unset.")
    # fmt: on
