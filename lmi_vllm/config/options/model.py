"""The served model, its quantization and its LoRA adapters."""

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import Section, computes, maps_to, option, ours, warns


class Model(Section):
    """The model, and how its files are read."""

    section = "Model"

    # fmt: off
    model_id: str | None = option(parse.plain_text, computes("model"), aliases=("model",),
        values="hub id, `s3://…`, `gs://…`, `az://…`, path",
        note="The model: hub id, prefix of a store, or path.")
    model_dir: str | None = option(parse.plain_text, ours(), values="path",
        note="Directory of the weights where no model id is set. It must exist.")
    revision: str | None = option(parse.plain_text, maps_to("revision"),
        values="branch, tag or commit",
        note="Revision of the hub model, its tokenizer and its code.")
    trust_remote_code: bool = option(parse.boolean, maps_to("trust_remote_code"), default=False,
        note="Run Python code that comes with the model. Set `revision`, too.")
    dtype: str = option(parse.dtype, maps_to("dtype"), default="auto",
        values="auto, fp32, fp16, bf16, half, float",
        note="Number format of weights and activations.")
    load_format: str | None = option(parse.plain_text, computes("load_format"),
        values="auto, safetensors, pt, dummy, runai_streamer, sharded_state, …",
        note="How the weight files are read.")
    max_model_len: int = option(parse.human_int_or_auto, maps_to("max_model_len"), default=-1,
        values="tokens, `16k`, `16K`, auto", note="Longest prompt plus answer in tokens. -1 is the "
        "model's own length, or the longest whose KV cache fits. With encoder-decoder models it "
        "bounds prompt and answer each.")
    tokenizer_mode: str | None = option(parse.plain_text, computes("tokenizer_mode"),
        values="auto, hf, mistral, …", note="Which tokenizer implementation is used.")
    task: str = option(parse.any_text, computes("runner", "convert"), default="auto",
        values="auto, text-generation, text-embedding, feature-extraction, classify, score, rerank",
        note="What the model is served for. `runner` and `convert` win over it.")
    runner: str | None = option(parse.as_vllm, maps_to("runner"),
        values="auto, generate, pooling, draft", note="What kind of model it is run as.")
    convert: str | None = option(parse.as_vllm, maps_to("convert"),
        values="auto, none, classify, embed", note="What a model that makes text is turned into.")
    normalize: bool = option(parse.boolean, ours(), default=True, note="L2-normalise embeddings.")
    hf_overrides: object = option(parse.as_vllm, maps_to("hf_overrides"), values="JSON",
        note="Changes to the model's own config.json.")
    ignore_patterns: list[str] | None = option(parse.as_vllm, maps_to("ignore_patterns"),
        values="list of globs", note="Files of a hub model that are not fetched, instead of "
        "original/**/*.")
    download_dir: str | None = option(parse.as_vllm, maps_to("download_dir"), values="path",
        note="The hub's cache, where it is not below HF_HOME.")
    low_cpu_mem_usage: str | None = option(parse.any_text,
        warns("vLLM always loads weights without a second copy"))
    # fmt: on


class Quantization(Section):
    """Methods that reduce the size of the weights."""

    section = "Quantization"

    # fmt: off
    quantize: str | None = option(parse.plain_text, computes("quantization"),
        aliases=("quantization",), values="awq, gptq, fp8, compressed-tensors, …",
        note="Quantize while loading. A quantized checkpoint does not need it.")
    load_in_8bit: bool | None = option(parse.boolean, computes("quantization"),
        note="true: 8-bit weights.")
    load_in_4bit: bool | None = option(parse.boolean, computes("quantization"),
        note="Refused when true: vLLM has no 4-bit quantization at load time.")
    # fmt: on


class Lora(Section):
    """LoRA adapters of the model."""

    section = "LoRA adapters"

    # fmt: off
    enable_lora: bool = option(parse.boolean, maps_to("enable_lora"), default=False,
        note="Serve LoRA adapters.")
    max_loras: int = option(parse.positive_int, maps_to("max_loras"), default=4,
        values="number >= 1", note="Adapters in GPU memory at once.")
    max_lora_rank: int | None = option(parse.positive_int, computes("max_lora_rank"),
        values="1 … 512", note="Highest adapter rank (16 when unset), rounded up to one of vLLM's.")
    max_cpu_loras: int | None = option(parse.positive_int, maps_to("max_cpu_loras"),
        values="number >= max_loras", note="Adapters kept in host memory.")
    fully_sharded_loras: bool | None = option(parse.boolean, maps_to("fully_sharded_loras"),
        values="bool", note="Shard both LoRA matrices over the GPUs.")
    lora_dtype: str | None = option(parse.as_vllm, maps_to("lora_dtype"),
        values="auto, float16, bfloat16", note="Number format of the adapters.")
    lora_extra_vocab_size: str | None = option(parse.any_text,
        warns("vLLM no longer lets adapters add tokens"))
    long_lora_scaling_factors: str | None = option(parse.any_text,
        warns("vLLM no longer has LongLoRA scaling"))
    adapters: str = option(parse.plain_text, ours(), default="adapters", values="name",
        note="Sub-directory of the model directory scanned for adapters.")
    lora_modules: dict[str, str] | None = option(parse.lora_modules, ours(),
        values="`name=path`, a JSON object, or a list of them", note="Adapters that are registered "
        "at the start, as with `vllm serve --lora-modules`. Paths, URLs and hub ids are sources.")
    # fmt: on
