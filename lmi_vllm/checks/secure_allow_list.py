"""The keys that secure mode lets anybody set (startup.md 11); nothing else passes."""

from typing import Final

_SERVER_KEYS: Final = (
    "engine", "job_queue_size", "max_idle_time", "batch_size", "max_batch_delay",
    "max_dynamic_batch_size", "minWorkers", "maxWorkers", "load_on_devices",
)  # fmt: skip
_OPTIONS: Final = """
    mpi_mode entryPoint task model_id batch_size tensor_parallel_degree pipeline_parallel_degree
    rolling_batch dtype trust_remote_code revision max_rolling_batch_size parallel_loading
    model_loading_timeout output_formatter n_positions load_in_8bit unroll context_length_estimate
    low_cpu_mem_usage load_split_model compiled_graph_path group_query_attention
    enable_mixed_precision_accumulation enable_saturate_infinity speculative_draft_model
    speculative_length draft_model_compiled_path draft_model_tp_size quantize
    max_rolling_batch_prefill_tokens max_model_len load_format enforce_eager
    gpu_memory_utilization record_acceptance_rate enable_lora max_loras max_lora_rank
    lora_extra_vocab_size max_cpu_loras max_input_len max_output_len max_num_tokens
    use_custom_all_reduce tokens_per_block batch_scheduler_policy kv_cache_free_gpu_mem_fraction
    max_num_sequences enable_trt_overlap enable_kv_cache_reuse baichuan_model_version
    chatglm_model_version gpt_model_version multi_block_mode use_fused_mlp rotary_base rotary_dim
    rotary_scaling_type rotary_scaling_factor logits_dtype trtllm_checkpoint_path load_by_shard
    smoothquant_alpha smoothquant_per_token smoothquant_per_channel multi_query_mode awq_format
    awq_calib_size q_format calib_size calib_batch_size use_fp8_context_fmha
    enable_chunked_prefill cpu_offload_gb_per_gpu enable_prefix_caching disable_sliding_window
    enable_streaming tgi_compat pythonExecutable
"""
ALLOWED_KEYS: Final = frozenset((*_SERVER_KEYS, *(f"option.{name}" for name in _OPTIONS.split())))
