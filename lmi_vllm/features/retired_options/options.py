"""Names that older configurations hold: what they become, or why they have no effect."""

from typing import ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import (
    DROPPED,
    OTHER_BACKENDS,
    SERVER_LEVEL,
    Effect,
    EffectWord,
    computes,
    maps_to,
    no_effect,
    option,
    refuses,
    warns,
)
from lmi_vllm.config.settings import FeatureSettings

_SPECULATIVE: Final = "vLLM has dropped it; option.speculative_config describes the drafter"


def fallback_for(target: str, text: str = "") -> Effect:
    """The value becomes the engine argument if that is not set otherwise; `text` is the warning."""
    return Effect(EffectWord.MAPS_TO, (target,), text, is_fallback=True)


def boolean_or_text(text: str) -> bool | str:
    """A boolean if the text is one, else the text: for names whose value has no effect."""
    try:
        return parse.boolean(text)
    except ValueError:
        return text


def foreign(text: str, note: str = "") -> str | None:
    """Return a field for an option of another LMI backend without an equivalent here."""
    return option(parse.any_text, warns(text), note=note)


def dropped(text: str = "vLLM has dropped it and has nothing in its place") -> str | None:
    """Return a field for an engine argument that newer vLLM releases no longer have."""
    return option(parse.any_text, warns(text))


def ignored(text: str = "it belonged to the Java server") -> str | None:
    """Return a field for a server key that has no meaning without the Java server."""
    return option(parse.any_text, no_effect(text), written=SERVER_LEVEL)


class ForeignOptions(FeatureSettings):
    """Of DeepSpeed, Accelerate, LMI-Dist, Neuron and TensorRT-LLM."""

    section: ClassVar[str] = OTHER_BACKENDS

    # fmt: off
    max_tokens: int | None = option(parse.positive_human_int, fallback_for("max_model_len", "it "
        "was DeepSpeed's prompt plus answer"), note="DeepSpeed.")
    enable_cuda_graph: bool | None = option(parse.boolean, computes("enforce_eager"),
        note="DeepSpeed. enforce_eager is its inverse.")
    n_positions: int | None = option(parse.positive_human_int,
        fallback_for("max_model_len", "it was Neuron's sequence length"), note="Neuron.")
    load_split_model: bool | None = option(parse.boolean,
        refuses("this layout cannot be read; use the original Hugging Face checkpoint",
                quiet_for=(False,)),
        note="Neuron.")
    max_input_len: int | None = option(parse.positive_human_int, computes("max_model_len"),
        note="TensorRT-LLM. With max_output_len: max_model_len is the sum.")
    max_output_len: int | None = option(parse.positive_human_int, computes("max_model_len"),
        note="TensorRT-LLM. With max_input_len: max_model_len is the sum.")
    max_num_tokens: int | None = option(parse.positive_human_int,
        fallback_for("max_num_batched_tokens", "it was TensorRT-LLM's step size"),
        note="TensorRT-LLM.")
    max_num_sequences: int | None = option(parse.positive_int, fallback_for("max_num_seqs"),
        note="TensorRT-LLM. Sequences at once.")
    kv_cache_free_gpu_mem_fraction: float | None = option(parse.fraction,
        fallback_for("gpu_memory_utilization", "it was a share of free memory, vLLM's is a share "
        "of all memory"), note="TensorRT-LLM.")
    tokens_per_block: int | None = option(parse.positive_int,
        fallback_for("block_size", "it was TensorRT-LLM's block size"), note="TensorRT-LLM.")
    use_custom_all_reduce: bool | None = option(parse.boolean,
        computes("disable_custom_all_reduce"), note="false means disable_custom_all_reduce=true.")
    triangular_masking: str | None = foreign("vLLM takes the mask from the model", "DeepSpeed.")
    return_tuple: str | None = foreign("it shaped DeepSpeed's modules", "DeepSpeed.")
    training_mp_size: str | None = foreign("checkpoints need no model parallel size", "DeepSpeed.")
    checkpoint: str | None = foreign("the Hugging Face weights in the model directory are used",
        "DeepSpeed.")
    smoothquant_alpha: str | None = foreign("quantize the checkpoint ahead of time instead",
        "DeepSpeed, TensorRT-LLM.")
    device_map: str | None = foreign("option.tensor_parallel_degree places the model",
        "Accelerate.")
    decoding_strategy: str | None = foreign("sampling is decided per request", "Accelerate.")
    max_sparsity: str | None = foreign("it belonged to the removed scheduler", "Accelerate.")
    max_splits: str | None = foreign("it belonged to the removed scheduler", "Accelerate.")
    disable_flash_attn: str | None = foreign(
        "option.attention_backend chooses the attention kernel", "Accelerate.")
    paged_attention: bool | str | None = option(boolean_or_text,
        warns("vLLM's attention is always paged", quiet_for=(True,)), note="LMI-Dist.")
    unroll: str | None = foreign("it belonged to the Neuron compiler", "Neuron.")
    neuron_optimize_level: str | None = foreign("it belonged to the Neuron compiler", "Neuron.")
    context_length_estimate: str | None = foreign("it belonged to the Neuron compiler", "Neuron.")
    compiled_graph_path: str | None = foreign("it held Neuron's compiled graphs", "Neuron.")
    batch_scheduler_policy: str | None = foreign("vLLM schedules by itself", "TensorRT-LLM.")
    enable_trt_overlap: str | None = foreign("closest is option.async_scheduling", "TensorRT-LLM.")
    baichuan_model_version: str | None = foreign("vLLM reads the model's own config.json",
        "TensorRT-LLM.")
    smoothquant_per_token: str | None = foreign("quantize the checkpoint ahead of time",
        "TensorRT-LLM.")
    smoothquant_per_channel: str | None = foreign("quantize the checkpoint ahead of time",
        "TensorRT-LLM.")
    multi_query_mode: str | None = foreign("vLLM reads the model's own config.json",
        "TensorRT-LLM.")
    # fmt: on


class DroppedArguments(FeatureSettings):
    """What older vLLM releases took."""

    section: ClassVar[str] = DROPPED

    # fmt: off
    disable_log_requests: bool | None = option(parse.boolean, computes("enable_log_requests"),
        note="enable_log_requests is its inverse.")
    rope_scaling: dict[str, object] | None = option(parse.json_object, computes("hf_overrides"),
        values="JSON", note="Folded into hf_overrides where that is unset.")
    rope_theta: float | None = option(parse.real_number, computes("hf_overrides"),
        note="Folded into hf_overrides where that is unset.")
    worker_use_ray: bool | None = option(parse.boolean, computes("distributed_executor_backend"),
        note="true means distributed_executor_backend=ray.")
    guided_decoding_backend: str | None = option(parse.plain_text,
        computes("structured_outputs_config"), note="Becomes structured_outputs_config's backend.")
    override_pooler_config: dict[str, object] | None = option(parse.json_object,
        fallback_for("pooler_config"), values="JSON", note="Older name of pooler_config.")
    collect_detailed_traces: list[str] | None = option(parse.as_vllm,
        maps_to("collect_detailed_traces"), is_lenient=True, values="model, worker, all",
        note="Older vLLM took any text; what is none of these counts as unset.")
    max_seq_len_to_capture: str | None = dropped("use option.cudagraph_capture_sizes or "
        "option.max_cudagraph_capture_size")
    max_context_len_to_capture: str | None = dropped("use option.cudagraph_capture_sizes or "
        "option.max_cudagraph_capture_size")
    cuda_graph_sizes: str | None = dropped("use option.cudagraph_capture_sizes or "
        "option.max_cudagraph_capture_size")
    swap_space: str | None = dropped()
    use_v2_block_manager: str | None = dropped()
    num_scheduler_steps: str | None = dropped()
    multi_step_stream_outputs: str | None = dropped()
    preemption_mode: str | None = dropped()
    scheduler_delay_factor: str | None = dropped()
    num_lookahead_slots: str | None = dropped()
    tokenizer_pool_size: str | None = dropped()
    tokenizer_pool_type: str | None = dropped()
    tokenizer_pool_extra_config: str | None = dropped()
    qlora_adapter_name_or_path: str | None = dropped()
    enable_prompt_adapter: str | None = dropped()
    max_prompt_adapters: str | None = dropped()
    max_prompt_adapter_token: str | None = dropped()
    quantization_param_path: str | None = dropped()
    disable_async_output_proc: str | None = dropped()
    enable_lora_bias: str | None = dropped()
    calculate_kv_scales: str | None = dropped()
    speculative_model_quantization: str | None = dropped(_SPECULATIVE)
    speculative_draft_tensor_parallel_size: str | None = dropped(_SPECULATIVE)
    speculative_max_model_len: str | None = dropped(_SPECULATIVE)
    speculative_disable_mqa_scorer: str | None = dropped()
    speculative_disable_by_batch_size: str | None = dropped()
    spec_decoding_acceptance_method: str | None = dropped()
    typical_acceptance_sampler_posterior_threshold: str | None = dropped()
    typical_acceptance_sampler_posterior_alpha: str | None = dropped()
    disable_logprobs_during_spec_decoding: str | None = dropped()
    override_neuron_config: str | None = dropped()
    # fmt: on


class JavaServerKeys(FeatureSettings):
    """Settings of LMI's Java server."""

    section: ClassVar[str] = "Server"

    # fmt: off
    model_url_pattern: str | None = ignored()
    wait_model_loading: str | None = ignored("/ping is never 200 before the model answers")
    allow_multi_status: str | None = ignored("there is one model")
    error_rate_model: str | None = ignored("it is never counted upstream either")
    keystore: str | None = ignored("use private_key_file and certificate_file")
    keystore_pass: str | None = ignored("use private_key_file and certificate_file")
    keystore_type: str | None = ignored("use private_key_file and certificate_file")
    number_of_netty_threads: str | None = ignored()
    netty_client_threads: str | None = ignored()
    use_native_io: str | None = ignored()
    io_ratio: str | None = ignored()
    plugin_folder: str | None = ignored()
    prefer_direct_buffer: str | None = ignored()
    # fmt: on
