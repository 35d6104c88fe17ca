"""The option table: every name a user may write, what it is and what becomes of it.

One row per name, described here and nowhere else: parsing, translation, `explain`, the reference
page and the JSON schema are all made from these rows. To add an option, add a row.

`OPTIONS` are written `option.<name>` in serving.properties or `OPTION_<NAME>` in the environment.
`SERVER_SETTINGS` are written without a prefix in serving.properties or config.properties, or
`SERVING_<NAME>`; where says which. `ENVIRONMENT_SETTINGS` are whole variable names.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.parsers import Parser


class EffectWord(StrEnum):
    """What becomes of a setting; the words `explain` prints."""

    MAPS_TO = "maps_to"  # becomes an engine argument
    OURS = "ours"  # the server itself obeys it
    WARNS = "warns"  # accepted, no effect, one warning
    REFUSES = "refuses"  # start-up fails
    NONE = "none"  # accepted, no effect, nothing to say
    UNKNOWN = "unknown"  # no such name; the only word no row carries


@dataclass(frozen=True, slots=True)
class Effect:
    """What becomes of an option.

    `targets` are engine arguments. `is_computed`: translation has a rule of its own for it;
    `is_fallback`: it counts only where the target is not set otherwise. `text` is the warning or
    the advice; values in `quiet_for` draw none.
    """

    word: EffectWord
    targets: tuple[str, ...] = ()
    text: str = ""
    is_computed: bool = False
    is_fallback: bool = False
    quiet_for: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One row. `written` is where a server setting may stand: file, serving, config."""

    name: str
    parse: Parser
    effect: Effect
    aliases: tuple[str, ...] = ()
    default: object = None
    section: str = ""
    note: str = ""
    values: str = ""
    is_lenient: bool = False  # a bad value is a warning and the default stands
    written: tuple[str, ...] = ()


def maps_to(*targets: str) -> Effect:
    """The value becomes the engine argument as it is."""
    return Effect(EffectWord.MAPS_TO, targets)


def computes(*targets: str) -> Effect:
    """Engine arguments follow from the value by a rule of translate/arguments.py."""
    return Effect(EffectWord.MAPS_TO, targets, is_computed=True)


def stands_in_for(target: str, text: str = "") -> Effect:
    """The value becomes the engine argument where that is not set otherwise; `text` is warned."""
    return Effect(EffectWord.MAPS_TO, (target,), text, is_fallback=True)


def ours(*targets: str) -> Effect:
    """The server itself obeys the value (and hands it to `targets` of the engine)."""
    return Effect(EffectWord.OURS, targets)


def warns(text: str, quiet_for: tuple[object, ...] = ()) -> Effect:
    """Accepted without effect; `text` says why or what does it today."""
    return Effect(EffectWord.WARNS, (), text, quiet_for=quiet_for)


def refuses(text: str, quiet_for: tuple[object, ...] = ()) -> Effect:
    """Start-up fails; `text` says what to use instead."""
    return Effect(EffectWord.REFUSES, (), text, quiet_for=quiet_for)


def no_effect(text: str = "") -> Effect:
    """Accepted; there is nothing to do."""
    return Effect(EffectWord.NONE, (), text)


def _dropped(name: str, text: str = "vLLM has dropped it and has nothing in its place") -> Option:
    """A row for an engine argument that newer vLLM releases no longer have."""
    return Option(name, parse.any_text, warns(text), section=DROPPED)


def _foreign(name: str, text: str, note: str = "") -> Option:
    """A row for an option of another LMI backend that has no equivalent here."""
    return Option(name, parse.any_text, warns(text), section=OTHER_BACKENDS, note=note)


MODEL: Final = "Model"
PARALLEL: Final = "Devices and copies"
BATCHING: Final = "Batching, memory and speed"
QUANTIZATION: Final = "Quantization"
SPECULATIVE: Final = "Speculative decoding"
LORA: Final = "LoRA adapters"
SERVING: Final = "Requests and replies"
CHAT: Final = "Chat, tools and reasoning"
CODE: Final = "Custom code and process"
SESSIONS: Final = "Sessions"
LMCACHE: Final = "LMCache and KV transfer"
OTHER_BACKENDS: Final = "Options of other backends"
DROPPED: Final = "Arguments vLLM has dropped"
SERVER: Final = "Server"
ENVIRONMENT: Final = "Environment"

_DECIDED_PER_REQUEST: Final = "is decided per request"

OPTIONS: Final[tuple[Option, ...]] = (
    # --- Model
    Option("model_id", parse.plain_text, computes("model"), section=MODEL,
           note="The model: hub id, s3:// prefix or local path.",
           values="hub id, `s3://…`, path"),
    Option("model_dir", parse.plain_text, ours(), section=MODEL, values="path",
           note="Directory of the weights when no model id is set and the directory exists."),
    Option("revision", parse.plain_text, maps_to("revision"), section=MODEL,
           values="branch, tag or commit",
           note="Revision of the hub model, its tokenizer and its code."),
    Option("trust_remote_code", parse.boolean, maps_to("trust_remote_code"), default=False,
           section=MODEL, note="Run Python code that comes with the model; pin `revision` too."),
    Option("dtype", parse.dtype, maps_to("dtype"), default="auto", section=MODEL,
           values="auto, fp32, fp16, bf16, half, float",
           note="Number format of weights and activations."),
    Option("load_format", parse.plain_text, computes("load_format"), section=MODEL,
           values="auto, safetensors, pt, dummy, runai_streamer, sharded_state, …",
           note="How the weight files are read."),
    Option("max_model_len", parse.human_int_or_auto, maps_to("max_model_len"), default=-1,
           section=MODEL, values="tokens, `16k`, `16K`, auto",
           note="Longest prompt plus answer in tokens; -1: the model's own length if its KV cache "
           "fits, else the longest that does. Encoder-decoder models: of each, prompt and answer."),
    Option("tokenizer_mode", parse.plain_text, computes("tokenizer_mode"), section=MODEL,
           values="auto, hf, mistral, …", note="Which tokenizer implementation is used."),
    Option("task", parse.any_text, computes("runner", "convert"), default="auto", section=MODEL,
           values="auto, text-generation, text-embedding, feature-extraction, classify, score, "
                  "rerank",
           note="What the model is served for; an explicit runner or convert wins."),
    Option("normalize", parse.boolean, ours(), default=True, section=MODEL,
           note="L2-normalise embeddings."),
    Option("hf_overrides", parse.as_vllm, maps_to("hf_overrides"), section=MODEL, values="JSON",
           note="Changes to the model's own config.json."),
    Option("low_cpu_mem_usage", parse.any_text,
           warns("vLLM always loads weights without a second copy"), section=MODEL),
    # --- Devices and copies
    Option("tensor_parallel_degree", parse.parallel_degree, computes("tensor_parallel_size"),
           aliases=("tensor_parallel_size",), default="max", section=PARALLEL,
           values="number, max", note="GPUs that share one copy of the model; max: all of them "
           "divided by the pipeline degree."),
    Option("pipeline_parallel_degree", parse.pipeline_degree, computes("pipeline_parallel_size"),
           aliases=("pipeline_parallel_size",), default=1, section=PARALLEL, values="number",
           note="Stages one copy of the model is cut into."),
    Option("data_parallel_size", parse.as_vllm, computes("data_parallel_size"), section=PARALLEL,
           values="number", note="Copies of the model; unset: as many as the GPUs allow, one "
           "with LoRA."),
    Option("device_ids", parse.as_vllm, maps_to("device_ids"), section=PARALLEL, values="list",
           note="The physical GPUs to use."),
    Option("enable_expert_parallel", parse.as_vllm, maps_to("enable_expert_parallel"),
           section=PARALLEL, values="bool", note="Spread experts instead of slicing each."),
    Option("worker_use_ray", parse.boolean, computes("distributed_executor_backend"),
           section=DROPPED, note="true means distributed_executor_backend=ray."),
    Option("use_custom_all_reduce", parse.boolean, computes("disable_custom_all_reduce"),
           section=OTHER_BACKENDS, note="false means disable_custom_all_reduce=true."),
    Option("device", parse.any_text, warns("vLLM finds the device itself"), section=PARALLEL),
    # --- Batching, memory and speed
    Option("max_rolling_batch_size", parse.positive_int, maps_to("max_num_seqs"),
           aliases=("max_num_seqs",), default=256, section=BATCHING, values="number >= 1",
           note="Sequences the engine runs at once, per copy."),
    Option("max_rolling_batch_prefill_tokens", parse.positive_human_int,
           maps_to("max_num_batched_tokens"), aliases=("max_num_batched_tokens",),
           section=BATCHING, values="tokens", note="Tokens the engine computes in one step."),
    Option("gpu_memory_utilization", parse.fraction, maps_to("gpu_memory_utilization"),
           section=BATCHING, values="0 < x <= 1",
           note="Share of GPU memory the engine takes; unset: vLLM's own default."),
    Option("cpu_offload_gb_per_gpu", parse.gigabytes, maps_to("cpu_offload_gb"),
           aliases=("cpu_offload_gb",), default=0.0, section=BATCHING, values="GB",
           note="Weights kept in host memory, per GPU; nothing moves on a CPU."),
    Option("enforce_eager", parse.boolean, maps_to("enforce_eager"), section=BATCHING,
           values="bool", note="true: no CUDA graphs; slower, starts faster."),
    Option("enable_chunked_prefill", parse.boolean, maps_to("enable_chunked_prefill"),
           section=BATCHING, values="bool", note="Unset: the engine decides, normally on."),
    Option("enable_prefix_caching", parse.boolean, maps_to("enable_prefix_caching"),
           section=BATCHING, values="bool", note="Reuse the KV cache of equal prompt beginnings."),
    Option("disable_sliding_window", parse.boolean, maps_to("disable_sliding_window"),
           section=BATCHING, values="bool", note="Cap the context at the sliding window."),
    Option("limit_mm_per_prompt", parse.modality_limits, maps_to("limit_mm_per_prompt"),
           section=BATCHING, values='`{"image": 4}` or `image=4`',
           note="Images, videos or sounds allowed in one prompt."),
    Option("rolling_batch", parse.any_text, no_effect(), default="auto", section=BATCHING,
           values="auto, vllm, disable", note="Kept for LMI's sake: continuous batching is always "
           "on."),
    Option("batch_size", parse.any_text,
           warns("continuous batching is always on", quiet_for=("1",)), section=BATCHING),
    # --- Quantization
    Option("quantize", parse.plain_text, computes("quantization"), aliases=("quantization",),
           section=QUANTIZATION, values="awq, gptq, fp8, compressed-tensors, …",
           note="Quantize at load time; a checkpoint quantized ahead of time needs none."),
    Option("load_in_8bit", parse.boolean, computes("quantization"), section=QUANTIZATION,
           note="true: 8-bit weights."),
    Option("load_in_4bit", parse.boolean, computes("quantization"), section=QUANTIZATION,
           note="Refused when true: vLLM has no 4-bit quantization at load time."),
    # --- Speculative decoding
    Option("speculative_draft_model", parse.plain_text, computes("speculative_config"),
           aliases=("draft_model_id",), section=SPECULATIVE, values="hub id, `s3://…`, path",
           note="The small model that guesses ahead."),
    Option("speculative_length", parse.positive_int, computes("speculative_config"),
           aliases=("spec_length",), section=SPECULATIVE, values="number",
           note="Tokens guessed per step; 5 when a draft model is set."),
    Option("draft_model_tp_size", parse.positive_int, computes("speculative_config"),
           section=SPECULATIVE, values="1 or the tensor parallel degree",
           note="GPUs the draft model uses; 1 when a draft model is set."),
    Option("speculative_config", parse.as_vllm, computes("speculative_config"),
           section=SPECULATIVE, values="JSON", note="vLLM's own form; not beside the three above."),
    Option("record_acceptance_rate", parse.any_text,
           warns("vLLM logs the acceptance rate by itself", quiet_for=("false", "False", "FALSE")),
           section=SPECULATIVE),
    # --- LoRA
    Option("enable_lora", parse.boolean, maps_to("enable_lora"), default=False, section=LORA,
           note="Serve LoRA adapters."),
    Option("max_loras", parse.positive_int, maps_to("max_loras"), default=4, section=LORA,
           values="number >= 1", note="Adapters in GPU memory at once."),
    Option("max_lora_rank", parse.positive_int, computes("max_lora_rank"), section=LORA,
           values="1 … 512",
           note="Largest adapter rank; rounded up to one vLLM has, 16 when unset."),
    Option("max_cpu_loras", parse.positive_int, maps_to("max_cpu_loras"), section=LORA,
           values="number >= max_loras", note="Adapters kept in host memory."),
    Option("fully_sharded_loras", parse.boolean, maps_to("fully_sharded_loras"), section=LORA,
           values="bool", note="Shard both LoRA matrices over the GPUs."),
    Option("lora_dtype", parse.as_vllm, maps_to("lora_dtype"), section=LORA,
           values="auto, float16, bfloat16", note="Number format of the adapters."),
    Option("lora_extra_vocab_size", parse.any_text,
           warns("vLLM no longer lets adapters add tokens"), section=LORA),
    Option("long_lora_scaling_factors", parse.any_text,
           warns("vLLM no longer has LongLoRA scaling"), section=LORA),
    Option("adapters", parse.plain_text, ours(), default="adapters", section=LORA,
           values="name", note="Sub-directory of the model directory scanned for adapters."),
    Option("adapters_state", parse.plain_text, ours(), section=LORA, values="path",
           note="File that remembers adapters registered over the API."),
    # --- Requests and replies
    Option("output_formatter", parse.plain_text, ours(), section=SERVING,
           values="json, jsonlines, sse, or a function of model.py",
           note="Shape of replies; unset: json, and jsonlines when streaming."),
    Option("tgi_compat", parse.boolean, ours(), default=False, section=SERVING,
           note="Answer in the schema of Text Generation Inference."),
    Option("stream_logprobs", parse.boolean, ours(), default=True, section=SERVING,
           note="false: streamed rows carry no log probabilities."),
    Option("model_loading_timeout", parse.seconds, ours(), default=1800, section=SERVING,
           values="seconds", is_lenient=True,
           note="Time the engine gets to start, downloads not counted; then start-up fails."),
    Option("predict_timeout", parse.seconds, ours(), default=240, section=SERVING,
           values="seconds", is_lenient=True, note="Time one request may take."),
    Option("served_model_name", parse.words, maps_to("served_model_name"), section=SERVING,
           values="list", note="Names the model answers to; `lmi` when unset."),
    Option("enable_streaming", parse.any_text,
           warns(f"streaming {_DECIDED_PER_REQUEST} (\"stream\": true)",
                 quiet_for=("false", "False", "FALSE")), section=SERVING),
    Option("bedrock_compat", parse.any_text,
           warns("that schema belonged to the old rolling batch", quiet_for=("false",)),
           section=SERVING),
    # --- Chat, tools and reasoning
    Option("enable_auto_tool_choice", parse.boolean, ours(), default=False, section=CHAT,
           note="Let the model decide to call tools; needs tool_call_parser."),
    Option("tool_call_parser", parse.plain_text, ours(), section=CHAT, values="parser name",
           note="How tool calls are read from the model's text."),
    Option("tool_parser_plugin", parse.plain_text, ours(), section=CHAT, values="path",
           note="Python file that registers further tool parsers."),
    Option("enable_reasoning", parse.boolean, ours(), default=False, section=CHAT,
           note="Older switch: checks that reasoning_parser is set and known."),
    Option("reasoning_parser", parse.plain_text, maps_to("reasoning_parser"), section=CHAT,
           values="parser name", note="How thinking is told from the answer."),
    Option("chat_template", parse.any_text, ours(), section=CHAT, values="path or Jinja text",
           note="Replaces the model's own chat template."),
    Option("chat_template_content_format", parse.one_of("auto", "string", "openai"), ours(),
           default="auto", section=CHAT, values="auto, string, openai",
           note="What the template expects as message content."),
    # --- Custom code and process
    Option("entryPoint", parse.any_text, ours(), section=CODE,
           values="file, path, URL or djl_python module",
           note="model.py of the model directory is used when unset."),
    Option("handler", parse.plain_text, ours(), default="handle", section=CODE, values="name",
           note="Function of the entry point."),
    Option("env", parse.environment_pairs, ours(), section=CODE, values="`A=1,B=2`",
           note="Environment variables for the engine process."),
    Option("async_mode", parse.any_text,
           warns("async mode is always on",
                 quiet_for=("true", "True", "TRUE")), section=CODE),
    Option("mpi_mode", parse.any_text, no_effect("there is no MPI process to choose"),
           section=CODE),
    Option("parallel_loading", parse.any_text, no_effect("there is one process to load"),
           section=CODE),
    Option("enable_venv", parse.any_text,
           warns("requirements go into the server's own environment",
                 quiet_for=("false", "False", "FALSE")), section=CODE),
    Option("pythonExecutable", parse.any_text, warns("there is one process and one Python"),
           section=CODE),
    # --- Sessions
    Option("enable_stateful_sessions", parse.boolean, ours(), default=True, section=SESSIONS,
           note="Sticky sessions."),
    Option("sessions_path", parse.plain_text, ours(), default="/dev/shm/djl_sessions",
           section=SESSIONS, values="path", note="Directory of the session files."),
    Option("sessions_expiration", parse.seconds, ours(), default=1200, section=SESSIONS,
           values="seconds", note="Life of a session after its creation."),
    Option("sessions_s3url", parse.plain_text, ours(), section=SESSIONS, values="`s3://…`",
           note="Sessions are copied there at exit."),
    # --- LMCache and KV transfer
    Option("kv_transfer_config", parse.as_vllm, computes("kv_transfer_config"), section=LMCACHE,
           values="JSON", note="KV connector; kv_role is mandatory."),
    Option("lmcache_config_file", parse.plain_text, ours(), section=LMCACHE, values="path",
           note="Exported as LMCACHE_CONFIG_FILE; relative to the model directory."),
    Option("lmcache_auto_config", parse.boolean, computes("kv_transfer_config"), default=False,
           section=LMCACHE, note="Size LMCache from the machine's memory and disk."),
    # --- Options of other backends
    Option("max_tokens", parse.positive_human_int,
           stands_in_for("max_model_len", "it was DeepSpeed's prompt plus answer"),
           section=OTHER_BACKENDS, note="DeepSpeed."),
    Option("enable_cuda_graph", parse.boolean, computes("enforce_eager"), section=OTHER_BACKENDS,
           note="DeepSpeed. enforce_eager is its inverse."),
    _foreign("triangular_masking", "vLLM takes the mask from the model", "DeepSpeed."),
    _foreign("return_tuple", "it shaped DeepSpeed's modules", "DeepSpeed."),
    _foreign("training_mp_size", "checkpoints need no model parallel size", "DeepSpeed."),
    _foreign("checkpoint", "the Hugging Face weights in the model directory are used",
             "DeepSpeed."),
    _foreign("smoothquant_alpha", "quantize the checkpoint ahead of time instead",
             "DeepSpeed, TensorRT-LLM."),
    _foreign("device_map", "option.tensor_parallel_degree places the model", "Accelerate."),
    _foreign("decoding_strategy", f"sampling {_DECIDED_PER_REQUEST}", "Accelerate."),
    _foreign("max_sparsity", "it steered the removed scheduler", "Accelerate."),
    _foreign("max_splits", "it steered the removed scheduler", "Accelerate."),
    _foreign("disable_flash_attn", "option.attention_backend chooses the attention kernel",
             "Accelerate."),
    Option("paged_attention", parse.boolean_or_text,
           warns("vLLM's attention is always paged", quiet_for=(True,)), section=OTHER_BACKENDS,
           note="LMI-Dist."),
    Option("n_positions", parse.positive_human_int,
           stands_in_for("max_model_len", "it was Neuron's sequence length"),
           section=OTHER_BACKENDS, note="Neuron."),
    _foreign("unroll", "it steered the Neuron compiler", "Neuron."),
    _foreign("neuron_optimize_level", "it steered the Neuron compiler", "Neuron."),
    _foreign("context_length_estimate", "it steered the Neuron compiler", "Neuron."),
    _foreign("compiled_graph_path", "it held Neuron's compiled graphs", "Neuron."),
    Option("load_split_model", parse.boolean,
           refuses("this layout cannot be read; use the original Hugging Face checkpoint",
                   quiet_for=(False,)), section=OTHER_BACKENDS, note="Neuron."),
    Option("max_input_len", parse.positive_human_int, computes("max_model_len"),
           section=OTHER_BACKENDS, note="TensorRT-LLM. With max_output_len: max_model_len is the "
           "sum."),
    Option("max_output_len", parse.positive_human_int, computes("max_model_len"),
           section=OTHER_BACKENDS, note="TensorRT-LLM. With max_input_len: max_model_len is the "
           "sum."),
    Option("max_num_tokens", parse.positive_human_int,
           stands_in_for("max_num_batched_tokens", "it was TensorRT-LLM's step size"),
           section=OTHER_BACKENDS, note="TensorRT-LLM."),
    Option("max_num_sequences", parse.positive_int, stands_in_for("max_num_seqs"),
           section=OTHER_BACKENDS, note="TensorRT-LLM. Sequences at once."),
    Option("kv_cache_free_gpu_mem_fraction", parse.fraction,
           stands_in_for("gpu_memory_utilization",
                         "it was a share of free memory, vLLM's is a share of all memory"),
           section=OTHER_BACKENDS, note="TensorRT-LLM."),
    Option("tokens_per_block", parse.positive_int,
           stands_in_for("block_size", "it was TensorRT-LLM's block size"),
           section=OTHER_BACKENDS, note="TensorRT-LLM."),
    _foreign("batch_scheduler_policy", "vLLM schedules by itself", "TensorRT-LLM."),
    _foreign("enable_trt_overlap", "closest is option.async_scheduling", "TensorRT-LLM."),
    _foreign("baichuan_model_version", "vLLM reads the model's own config.json", "TensorRT-LLM."),
    _foreign("smoothquant_per_token", "quantize the checkpoint ahead of time", "TensorRT-LLM."),
    _foreign("smoothquant_per_channel", "quantize the checkpoint ahead of time", "TensorRT-LLM."),
    _foreign("multi_query_mode", "vLLM reads the model's own config.json", "TensorRT-LLM."),
    # --- Arguments vLLM has dropped
    Option("disable_log_requests", parse.boolean, computes("enable_log_requests"),
           section=DROPPED, note="enable_log_requests is its inverse."),
    _dropped("max_seq_len_to_capture",
             "use option.cudagraph_capture_sizes or option.max_cudagraph_capture_size"),
    _dropped("max_context_len_to_capture",
             "use option.cudagraph_capture_sizes or option.max_cudagraph_capture_size"),
    _dropped("cuda_graph_sizes",
             "use option.cudagraph_capture_sizes or option.max_cudagraph_capture_size"),
    Option("rope_scaling", parse.json_object, computes("hf_overrides"), section=DROPPED,
           values="JSON", note="Folded into hf_overrides where that is unset."),
    Option("rope_theta", parse.real_number, computes("hf_overrides"), section=DROPPED,
           note="Folded into hf_overrides where that is unset."),
    Option("speculative_model", parse.plain_text, computes("speculative_config"),
           section=DROPPED, note="Becomes speculative_config where that is unset; [ngram] means "
           "the ngram method."),
    Option("num_speculative_tokens", parse.positive_int, computes("speculative_config"),
           section=DROPPED, note="Becomes part of speculative_config."),
    Option("ngram_prompt_lookup_max", parse.positive_int, computes("speculative_config"),
           section=DROPPED, note="Becomes part of speculative_config."),
    Option("ngram_prompt_lookup_min", parse.positive_int, computes("speculative_config"),
           section=DROPPED, note="Becomes part of speculative_config."),
    Option("guided_decoding_backend", parse.plain_text, computes("structured_outputs_config"),
           section=DROPPED, note="Becomes structured_outputs_config's backend."),
    Option("override_pooler_config", parse.json_object, stands_in_for("pooler_config"),
           section=DROPPED, values="JSON", note="Older name of pooler_config."),
    _dropped("swap_space"), _dropped("use_v2_block_manager"), _dropped("num_scheduler_steps"),
    _dropped("multi_step_stream_outputs"), _dropped("preemption_mode"),
    _dropped("scheduler_delay_factor"), _dropped("num_lookahead_slots"),
    _dropped("tokenizer_pool_size"), _dropped("tokenizer_pool_type"),
    _dropped("tokenizer_pool_extra_config"), _dropped("qlora_adapter_name_or_path"),
    _dropped("enable_prompt_adapter"), _dropped("max_prompt_adapters"),
    _dropped("max_prompt_adapter_token"), _dropped("quantization_param_path"),
    _dropped("disable_async_output_proc"), _dropped("enable_lora_bias"),
    _dropped("calculate_kv_scales"),
)  # fmt: skip

FILE: Final = "file"  # serving.properties, without prefix
ENV: Final = "serving"  # SERVING_<NAME>
CONFIG: Final = "config"  # config.properties
_EVERYWHERE: Final = (FILE, ENV, CONFIG)
_SERVER_LEVEL: Final = (ENV, CONFIG)


def _ignored_server(name: str, text: str = "it steered the Java server") -> Option:
    """A row for a server key that has no meaning without the Java server."""
    return Option(name, parse.any_text, no_effect(text), section=SERVER, written=_SERVER_LEVEL)


def _status(name: str, default: int, note: str) -> Option:
    """A row for a status code the user may choose."""
    return Option(name, parse.status_code, ours(), default=default, section=SERVER, note=note,
                  values="HTTP status", written=_SERVER_LEVEL)  # fmt: skip


def _workers(name: str, note: str, *, aliases: tuple[str, ...] = ()) -> Option:
    """A row for a worker count of serving.properties."""
    return Option(name, parse.count, ours(), aliases, section=PARALLEL, note=note,
                  values="number", written=(FILE,))  # fmt: skip


def _error_rate(name: str) -> Option:
    """A row for a failure window; http-api.md says how it is counted."""
    return Option(name, parse.error_rate_text, ours(), section=SERVER, values="`5/PT1M`, `5/60`",
                  note="So many failures within so long make /ping 503 until a restart.",
                  written=_SERVER_LEVEL)  # fmt: skip


SERVER_SETTINGS: Final[tuple[Option, ...]] = (
    Option("engine", parse.any_text, no_effect(), default="Python", section=SERVER,
           values="Python", written=(FILE,),
           note="LMI's engine; MPI, DeepSpeed and FasterTransformer are read as Python."),
    Option("job_queue_size", parse.positive_int, ours(), default=1000, section=SERVER,
           values="number >= 1", written=_EVERYWHERE,
           note="Requests in flight; one more gets the throttle code."),
    Option("batch_size", parse.any_text,
           warns("continuous batching is always on", quiet_for=("1",)), section=SERVER,
           written=_EVERYWHERE),
    Option("max_dynamic_batch_size", parse.any_text,
           warns("continuous batching is always on", quiet_for=("1",)), section=SERVER,
           written=(FILE,)),
    Option("max_batch_delay", parse.any_text, no_effect("requests never wait for a batch"),
           ("option.max_batch_delay",), section=SERVER, written=_EVERYWHERE),
    Option("max_idle_time", parse.any_text, no_effect("there is no worker to stop"),
           ("option.max_idle_time",), section=SERVER, written=_EVERYWHERE),
    _workers("minWorkers", "Kept for LMI's sake: every copy runs from the start."),
    _workers("maxWorkers", "Most copies of the model."),
    _workers("gpu.minWorkers", "As minWorkers, on GPUs."),
    _workers("gpu.maxWorkers", "As maxWorkers, on GPUs."),
    _workers("cpu.minWorkers", "As minWorkers, without GPU."),
    _workers("cpu.maxWorkers", "As maxWorkers, without GPU."),
    Option("min_workers", parse.count, ours(), section=PARALLEL, values="number",
           written=(ENV,), note="minWorkers where the file has none."),
    Option("max_workers", parse.count, ours(), section=PARALLEL, values="number",
           written=(ENV,), note="maxWorkers where the file has none."),
    Option("load_on_devices", parse.plain_text, computes("device_ids", "data_parallel_size"),
           ("option.load_on_devices",), default="*", section=PARALLEL, values="`*`, `2`, `0;2`",
           written=_EVERYWHERE, note="GPUs to use: one number is the first, several are one copy "
           "each."),
    Option("retry_threshold", parse.count, ours(), default=0, section=SERVER, values="number",
           written=(FILE, ENV), note="Engine failures tolerated before the process ends."),
    Option("required_memory_mb", parse.whole_number, ours(), default=0, section=SERVER,
           values="MiB", written=(FILE,), note="Free memory demanded before loading."),
    Option("reserved_memory_mb", parse.whole_number, ours(), default=500, section=SERVER,
           values="MiB", written=_EVERYWHERE, note="Memory that must stay free."),
    Option("gpu.required_memory_mb", parse.whole_number, ours(), section=SERVER, values="MiB",
           written=(FILE,), note="As required_memory_mb, on each GPU."),
    Option("gpu.reserved_memory_mb", parse.whole_number, ours(), section=SERVER, values="MiB",
           written=(FILE,), note="As reserved_memory_mb, on each GPU."),
    Option("log_request_metric", parse.boolean, ours(), default=False, section=SERVER,
           written=(FILE,), note="Log latency and throughput of requests."),
    Option("metrics_aggregation", parse.positive_int, ours(), default=1000, section=SERVER,
           values="requests", written=(FILE,), note="Requests between two such lines."),
    Option("inference_address", parse.address, ours(), default="http://127.0.0.1:8080",
           section=SERVER, values="`http://host:port`", written=_SERVER_LEVEL,
           note="Where requests are answered."),
    Option("management_address", parse.address, ours(), section=SERVER,
           values="`http://host:port`", written=_SERVER_LEVEL,
           note="A second listener with the management routes; unset: the same one."),
    Option("cluster_address", parse.address, no_effect("there is one process"),
           section=SERVER, written=_SERVER_LEVEL),
    Option("load_models", parse.plain_text, ours(), default="ALL", section=SERVER,
           values="ALL, NONE, or `[name=]url`", written=_SERVER_LEVEL,
           note="Which models of the store are served."),
    Option("model_store", parse.plain_text, ours(), default="/opt/ml/model", section=SERVER,
           values="path", written=_SERVER_LEVEL, note="Where the model directory is."),
    _ignored_server("model_url_pattern"),
    _ignored_server("wait_model_loading", "/ping is never 200 before the model answers"),
    _ignored_server("allow_multi_status", "there is one model"),
    Option("max_request_size", parse.positive_int, ours(), default=64 << 20, section=SERVER,
           values="bytes", written=_SERVER_LEVEL, note="Largest request body."),
    Option("chunked_read_timeout", parse.seconds, ours(), default=120, section=SERVER,
           values="seconds", is_lenient=True, written=_SERVER_LEVEL,
           note="Longest silence in a streamed reply."),
    Option("cors_allowed_origin", parse.plain_text, ours(), section=SERVER, written=_SERVER_LEVEL,
           note="Access-Control-Allow-Origin."),
    Option("cors_allowed_methods", parse.plain_text, ours(), section=SERVER,
           written=_SERVER_LEVEL, note="Access-Control-Allow-Methods."),
    Option("cors_allowed_headers", parse.plain_text, ours(), section=SERVER,
           written=_SERVER_LEVEL, note="Access-Control-Allow-Headers."),
    _error_rate("error_rate_wlm"), _error_rate("error_rate_server"),
    _error_rate("error_rate_any"),
    _ignored_server("error_rate_model", "it is never counted upstream either"),
    _status("bad_request_http_code", 400, "Answer to a request the server cannot read."),
    _status("wlm_error_http_code", 503, "Answer while no worker is available."),
    _status("throttle_error_http_code", 503, "Answer above job_queue_size."),
    _status("server_error_http_code", 500, "Answer to a fault of the server."),
    _status("timeout_http_code", 400, "Declared by LMI, never used."),
    Option("request_id_header_key", parse.plain_text, ours(), default="x-request-id",
           section=SERVER, written=_SERVER_LEVEL, note="Header that carries the request id."),
    _ignored_server("keystore", "use private_key_file and certificate_file"),
    _ignored_server("keystore_pass", "use private_key_file and certificate_file"),
    _ignored_server("keystore_type", "use private_key_file and certificate_file"),
    Option("private_key_file", parse.plain_text, ours(), section=SERVER, values="path",
           written=_SERVER_LEVEL, note="PEM key for https."),
    Option("certificate_file", parse.plain_text, ours(), section=SERVER, values="path",
           written=_SERVER_LEVEL, note="PEM certificate for https."),
    _ignored_server("number_of_netty_threads"), _ignored_server("netty_client_threads"),
    _ignored_server("use_native_io"), _ignored_server("io_ratio"),
    _ignored_server("plugin_folder"), _ignored_server("prefer_direct_buffer"),
    Option("download_dir", parse.plain_text, ours(), section=SERVER, values="path",
           written=(ENV,), note="Root of the S3 and archive cache."),
    Option("fail_fast", parse.boolean, ours(), default=False, section=SERVER, written=(ENV,),
           note="End with 137 as soon as retry_threshold is passed."),
    Option("health_check_override", parse.boolean, ours(), default=False, section=SERVER,
           written=(ENV,), note="/ping stays 200 after engine failures."),
    Option("memory_cache_capacity", parse.positive_int, ours(), section=SERVER, values="entries",
           written=(ENV,), note="Deferred results that are kept; unset: 1000."),
    Option("cache_batch", parse.positive_int, ours(), default=1, section=SERVER, values="pieces",
           written=(ENV,), note="Pieces of a deferred result that become readable at once."),
    Option("shutdown_timeout", parse.seconds_or_off, ours(), default=25, section=SERVER,
           values="seconds", written=(ENV,), note="Time requests get to end after SIGTERM."),
    Option("features", parse.any_text, no_effect("vllm is the only feature and always on"),
           section=SERVER, written=(ENV,)),
    Option("opts", parse.any_text, ours(), section=SERVER, written=(ENV,),
           values="`-Dai.djl.logging.level=debug`", note="Only the log level is read from it."),
    Option("prometheus", parse.any_text, no_effect("metrics are always on"), section=SERVER,
           written=(ENV,)),
)  # fmt: skip


def _variable(name: str, note: str, *, values: str = "text", default: object = None,
              read: Parser = parse.any_text) -> Option:  # fmt: skip
    """A row for a whole environment variable that the server itself obeys."""
    return Option(name, read, ours(), default=default, section=ENVIRONMENT, note=note,
                  values=values)  # fmt: skip


ENVIRONMENT_SETTINGS: Final[tuple[Option, ...]] = (
    _variable("LMI_STRICT", "Unknown names are errors (--strict).", values="bool", default=False,
              read=parse.boolean),
    _variable("LMI_API_KEY", "The key clients must send."),
    _variable("LMI_API_KEY_FILE", "File with one key a line.", values="path"),
    _variable("LMI_CUSTOM_CODE", "Whose Python code is loaded: `local`: model.py of the model "
              "directory and of the adapters in it; `roots`: also of adapters that are registered "
              "from below `LMI_ADAPTER_ROOTS`; `all`: also of fetched adapters; `none`.",
              values="local, roots, all, none", default="local",
              read=parse.one_of("local", "roots", "all", "none")),
    _variable("LMI_ADAPTER_ROOTS", "Local adapter sources must lie below one of these.",
              values="path list"),
    _variable("LMI_ADAPTER_HUB", "Adapter sources may be hub ids.", values="bool", default=False,
              read=parse.boolean),
    _variable("LMI_S3_CLIENT", "What fetches from S3.", values="auto, s5cmd, boto3",
              default="auto", read=parse.one_of("auto", "s5cmd", "boto3")),
    _variable("LMI_CACHE_URI", "Folder or s3:// prefix that keeps what vLLM compiles between "
              "containers: restored before the engine starts, saved once it is ready. It holds "
              "code: refused in secure mode, and where everybody may write the folder.",
              values="path or `s3://…`", read=parse.folder_or_s3),
    _variable("LMI_STALL_TIMEOUT", "Engine alive, work queued, no token for so long: /ping 503; "
              "0 is off.", values="seconds", default=120, read=parse.seconds_or_off),
    _variable("LMI_FRONTEND_PROCESSES", "HTTP processes over one engine.", values="number",
              default=1, read=parse.positive_int),
    _variable("LMI_MAX_SEQUENCES", "Most sequences for one prompt: n, best_of, num_beams.",
              values="number", default=16, read=parse.positive_int),
    _variable("LMI_MAX_STOP_STRINGS", "Most stop strings of a request, and bad words.",
              values="number", default=64, read=parse.count),
    _variable("LMI_MAX_STOP_LENGTH", "Longest stop string or bad word.", values="characters",
              default=1000, read=parse.positive_int),
    _variable("LMI_MAX_LOGIT_BIAS", "Most entries of logit_bias, stop_token_ids and "
              "allowed_token_ids.", values="number", default=1024, read=parse.count),
    _variable("LMI_MAX_GRAMMAR_SIZE", "Largest schema, regular expression or grammar that an "
              "answer is bound to.", values="bytes", default=64 << 10, read=parse.count),
    _variable("LMI_GRAMMAR_TIMEOUT", "Longest compilation of one, tried in a process of its own "
              "before the engine sees it; 0 is off.", values="seconds", default=10,
              read=parse.seconds_or_off),
    _variable("LMI_HEADER_TIMEOUT", "Time a client gets for the headers of a request; 0 is off.",
              values="seconds", default=30, read=parse.seconds_or_off),
    _variable("LMI_BODY_TIMEOUT", "Time a client gets to send a whole body; then 408; 0 is off.",
              values="seconds", default=120, read=parse.seconds_or_off),
    _variable("LMI_SEND_TIMEOUT", "Longest time a client may leave an answer unread; then it is "
              "cut off and its generation aborted; 0 is off.", values="seconds", default=60,
              read=parse.seconds_or_off),
    _variable("LMI_MEDIA_ALLOW_PRIVATE", "URLs inside messages may lead to addresses that are not "
              "public, and through a proxy.", values="bool", default=False, read=parse.boolean),
    _variable("LMI_MEDIA_MAX_SIZE", "Largest file that a URL inside a message may lead to.",
              values="bytes", default=64 << 20, read=parse.positive_int),
    _variable("LMI_MEDIA_TIMEOUT", "Time such a file gets, redirects included.", values="seconds",
              default=30, read=parse.seconds),
    _variable("LMI_LOG_FORMAT", "Lines of the log, vLLM's included; auto: text on a terminal, "
              "json elsewhere.", values="auto, text, json", default="auto",
              read=parse.one_of("auto", "text", "json")),
    _variable("LMI_METRICS_EMF", "Write CloudWatch EMF lines on stdout.", values="bool",
              default=False, read=parse.boolean),
    _variable("LMI_METRICS_EMF_INTERVAL", "Time between two of them.", values="seconds",
              default=60, read=parse.seconds),
    _variable("LMI_METRICS_EMF_NAMESPACE", "CloudWatch namespace of their metrics.",
              default="lmi_vllm"),
    _variable("SM_TELEMETRY_LOG_REV_2022_12", "File to which telemetry lines are appended; "
              "SageMaker sets it.", values="path"),
    _variable("LMI_CONSOLE", "The web console; auto: on loopback, or when a key is set.",
              values="auto, on, off", default="auto", read=parse.one_of("auto", "on", "off")),
    _variable("OTEL_EXPORTER_OTLP_ENDPOINT", "Traces are sent there, to /v1/traces below it "
              "unless by grpc; it becomes the engine argument otlp_traces_endpoint.", values="URL"),
    _variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "Traces are sent there exactly.",
              values="URL"),
    _variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "How; unset: OTEL_EXPORTER_OTLP_PROTOCOL, "
              "else grpc to port 4317 and HTTP to others.", values="grpc, http/protobuf",
              read=parse.one_of("grpc", "http/protobuf")),
    _variable("OTEL_EXPORTER_OTLP_PROTOCOL", "As OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.",
              values="grpc, http/protobuf", read=parse.one_of("grpc", "http/protobuf")),
    _variable("OTEL_SERVICE_NAME", "`service.name` of traces; unset: lmi_vllm."),
    _variable("HF_TOKEN", "Token for the Hugging Face hub."),
    _variable("HUGGING_FACE_HUB_TOKEN", "Read when HF_TOKEN is unset."),
    _variable("HF_HOME", "The hub library's cache.", values="path"),
    _variable("HF_ENDPOINT", "Another hub.", values="URL"),
    _variable("HF_HUB_OFFLINE", "Use only what the cache holds.", values="bool"),
    _variable("HF_HUB_ENABLE_HF_TRANSFER", "Means HF_XET_HIGH_PERFORMANCE today.", values="bool"),
    _variable("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "Accept of requests that bring none."),
    _variable("SAGEMAKER_MULTI_MODEL", "Start without a model and wait for POST /models.",
              values="bool", read=parse.java_true),
    _variable("SAGEMAKER_HEALTH_CHECK_OVERRIDE", "As SERVING_HEALTH_CHECK_OVERRIDE.",
              values="bool", read=parse.java_true),
    _variable("SAGEMAKER_SECURE_MODE", "Checks what a model directory may bring.", values="bool",
              read=parse.java_true),
    _variable("SAGEMAKER_SECURITY_CONTROLS", "The checks of secure mode.", values="list",
              read=parse.words),
    _variable("SAGEMAKER_UNTRUSTED_CHANNELS", "Directories secure mode scans.", values="list",
              read=parse.words),
    _variable("ALLOW_REQUEST_HANDLER_OVERRIDE", "A request's `handler` property is accepted, "
              "without effect, instead of 400.", values="bool", default=False,
              read=parse.java_true),
    _variable("OPT_OUT_TRACKING", "There is no tracking to opt out of."),
    _variable("DJL_CACHE_DIR", "Root of the cache when SERVING_DOWNLOAD_DIR is unset.",
              values="path"),
    _variable("DJL_OFFLINE", "Install requirements without an index.", values="bool"),
    _variable("DJL_CLUSTER_SIZE", "Nodes that serve one model.", values="number",
              read=parse.positive_int),
    _variable("LWS_GROUP_SIZE", "The same, set by LeaderWorkerSet.", values="number",
              read=parse.positive_int),
    _variable("DJL_LEADER_ADDR", "Host of the leading node.", values="host"),
    _variable("LWS_LEADER_ADDRESS", "The same, set by LeaderWorkerSet.", values="host"),
    _variable("LWS_LEADER_ADDR", "Set: the leader's name is completed with .svc.cluster.local.",
              values="host"),
    _variable("DJL_WORKER_ADDR_FORMAT", "Pattern of the other nodes' hosts."),
    _variable("DJL_NODE_RANK", "This node's number.", values="number", read=parse.count),
    _variable("LWS_WORKER_INDEX", "This node's number, set by LeaderWorkerSet.", values="number",
              read=parse.count),
    _variable("MASTER_ADDR", "Host of the leading node.", values="host"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AliasVariable:
    """A variable that is copied to `target` when that is unset or empty."""

    source: str
    target: str
    note: str = ""


# configuration.md 2.2: LMI's entry script does this rewriting; nobody else does it for us.
ALIAS_VARIABLES: Final[tuple[AliasVariable, ...]] = (
    AliasVariable("MAX_BATCH_SIZE", "OPTION_MAX_ROLLING_BATCH_SIZE"),
    AliasVariable("MAX_CONCURRENT_REQUESTS", "SERVING_JOB_QUEUE_SIZE"),
    AliasVariable("MAX_BATCH_PREFILL_TOKENS", "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS"),
    AliasVariable("HF_MODEL_TRUST_REMOTE_CODE", "OPTION_TRUST_REMOTE_CODE"),
    AliasVariable("HF_MODEL_QUANTIZE", "OPTION_QUANTIZE"),
    AliasVariable("SM_NUM_GPUS", "TENSOR_PARALLEL_DEGREE"),
    AliasVariable("CUDA_MEMORY_FRACTION", "OPTION_GPU_MEMORY_UTILIZATION"),
    AliasVariable("ENABLE_CUDA_GRAPHS", "OPTION_ENFORCE_EAGER", "inverted: true means false"),
)

# configuration.md 1, row 5: variable -> option, consulted only while the option is unset.
LATE_VARIABLES: Final[tuple[tuple[str, str], ...]] = (
    ("TENSOR_PARALLEL_DEGREE", "tensor_parallel_degree"),
    ("PIPELINE_PARALLEL_DEGREE", "pipeline_parallel_degree"),
    ("MODEL_LOADING_TIMEOUT", "model_loading_timeout"),
    ("PREDICT_TIMEOUT", "predict_timeout"),
    ("DJL_ENTRY_POINT", "entryPoint"),
)

# configuration.md 1, row 1: the only variables that override serving.properties.
SAGEMAKER_VARIABLES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("SAGEMAKER_NUM_MODEL_WORKERS", ("minWorkers", "maxWorkers")),
    ("SAGEMAKER_STARTUP_TIMEOUT", ("option.model_loading_timeout",)),
    ("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", ("option.predict_timeout",)),
)

# configuration.md 1: these beat OPTION_*, serving.properties beats them.
HUB_VARIABLES: Final[tuple[tuple[str, str], ...]] = (
    ("HF_MODEL_ID", "option.model_id"),
    ("HF_REVISION", "option.revision"),
    ("HF_TASK", "option.task"),
)
