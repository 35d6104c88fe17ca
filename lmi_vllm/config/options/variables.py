"""Settings that are environment variables; a field is the name in lower case."""

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import Section, variable
from lmi_vllm.messages import IMAGE_FORMATS, SAFE_IMAGE_FORMATS


class Variables(Section):
    """`LMI_*`, and variables that platforms and libraries share."""

    section = "Environment"

    # fmt: off
    lmi_strict: bool = variable(parse.boolean, "Unknown names are errors (--strict).",
        default=False, values="bool")
    lmi_api_key: str | None = variable(parse.verbatim,
        "The key clients must send; of several, a line each, one.")
    vllm_api_key: str | None = variable(parse.verbatim,
        "As LMI_API_KEY, under the name that `vllm serve` reads.")
    vllm_plugins: str | None = variable(parse.verbatim, "vLLM loads only these of its plug-ins; "
        "ours is added.", values="names")
    vllm_worker_multiproc_method: str | None = variable(parse.one_of("fork", "spawn", "forkserver"),
        "How processes of the engine are started, where that is not left to the server.",
        values="fork, spawn, forkserver")
    vllm_cpu_kvcache_space: int | None = variable(parse.positive_int, "KV cache on a CPU, as "
        "`kv_cache_memory_bytes`.", values="GiB")
    lmi_api_key_file: str | None = variable(parse.verbatim, "File with one key a line.",
        values="path")
    lmi_custom_code: str = variable(parse.one_of("local", "roots", "all", "none"), "Whose "
        "model.py is loaded. `local` is the model directory with its adapters. `roots` adds "
        "adapters below `LMI_ADAPTER_ROOTS`, `all` also those that were fetched.",
        default="local", values="local, roots, all, none")
    lmi_adapter_roots: str | None = variable(parse.verbatim,
        "Local adapter sources must lie below one of these.", values="path list")
    lmi_adapter_hub: bool = variable(parse.boolean, "Adapter sources may be hub ids.",
        default=False, values="bool")
    lmi_adapter_max_size: int = variable(parse.positive_human_int,
        "Most that is fetched or unpacked for one adapter, of at most 10000 files.",
        default=16 << 30, values="bytes")
    lmi_frontend_processes: int = variable(parse.positive_int, "HTTP processes over one engine.",
        default=1, values="number")
    lmi_max_sequences: int = variable(parse.positive_int,
        "Most sequences for one prompt: n, best_of, num_beams.", default=16, values="number")
    lmi_max_stop_strings: int = variable(parse.count,
        "Most stop strings of a request, and bad words.", default=64, values="number")
    lmi_max_stop_length: int = variable(parse.positive_int, "Longest stop string or bad word.",
        default=1000, values="characters")
    lmi_max_logit_bias: int = variable(parse.count,
        "Most entries of logit_bias, stop_token_ids and allowed_token_ids.", default=1024,
        values="number")
    lmi_max_prompt_logprobs: int = variable(parse.count, "Most log probabilities of the prompts "
        "of a request: their tokens, times one more than prompt_logprobs (with echo: logprobs), "
        "times n. vLLM writes them on the event loop.", default=16 << 10, values="number")
    lmi_max_grammar_size: int = variable(parse.human_count, "Largest schema, regular expression or "
        "grammar that an answer is bound to.", default=64 << 10, values="bytes")
    lmi_max_tokenize_length: int = variable(parse.positive_int, "Longest text, or list of token "
        "ids, that a request has converted only (/tokenize, /detokenize).", default=512 << 10,
        values="characters")
    lmi_grammar_timeout: float = variable(parse.seconds_or_off, "Longest compilation of one, tried "
        "in a process of its own before the engine sees it; 0 is off.", default=10,
        values="seconds")
    lmi_header_timeout: float = variable(parse.seconds_or_off,
        "Time a client gets for the headers of a request; 0 is off.", default=30, values="seconds")
    lmi_body_timeout: float = variable(parse.seconds_or_off,
        "Time a client gets to send a whole body; then 408; 0 is off.", default=120,
        values="seconds")
    lmi_send_timeout: float = variable(parse.seconds_or_off, "Longest time a client may leave an "
        "answer unread; then it is cut off and its generation aborted; 0 is off.", default=60,
        values="seconds")
    lmi_shutdown_delay: float = variable(parse.seconds_or_off, "So long after SIGTERM "
        "/ping and /ready are 503, and requests are served. Part of `shutdown_timeout`; 0 is off.",
        default=0, values="seconds")
    lmi_sleep_after_seconds: float = variable(parse.seconds_or_off, "A model without a request "
        "for so long falls asleep and gives its memory back; the next request wakes it; 0 is off.",
        default=0, values="seconds")
    lmi_sleep_level: str = variable(parse.one_of("stop", "1", "2"), "`stop` ends the "
        "engine, and another is started. Levels of vLLM keep it, on a GPU only: weights go to "
        "host memory (1) or are read again (2).", default="stop", values="stop, 1, 2")
    lmi_wake_timeout: float = variable(parse.seconds_or_off, "Longest time a request waits for a "
        "model that wakes; then it is 503 with Retry-After; 0 is no limit.", default=60,
        values="seconds")
    lmi_media_allow_private: bool = variable(parse.boolean, "URLs inside messages may lead to "
        "addresses that are not public, and through a proxy.", default=False, values="bool")
    lmi_media_max_size: int = variable(parse.positive_human_int,
        "Largest file that a URL inside a message may lead to.", default=64 << 20, values="bytes")
    lmi_media_max_pixels: int = variable(parse.positive_int, "Largest image in a message; all of "
        "a request together may have four times as many.", default=1 << 26, values="pixels")
    lmi_media_image_formats: tuple[str, ...] = variable(parse.words_of(*IMAGE_FORMATS), "Formats "
        "of images in messages. The head of the default ones bounds what is decoded; a small file "
        "of another can become gigabytes.", default=SAFE_IMAGE_FORMATS,
        values=", ".join(IMAGE_FORMATS))
    lmi_media_timeout: float = variable(parse.seconds, "Time such a file gets, redirects included.",
        default=30, values="seconds")
    lmi_log_format: str = variable(parse.one_of("auto", "text", "json"), "Lines of the log, vLLM's "
        "included; auto: text on a terminal, json elsewhere.", default="auto",
        values="auto, text, json")
    lmi_stats_interval: float = variable(parse.seconds_or_off, "Between two log lines of the "
        "engine's throughput, queue, cache use and acceptance rate; none while idle; 0 is off.",
        default=10, values="seconds")
    lmi_token_lane: bool = variable(parse.boolean, "Tokens of plain requests go past vLLM's output "
        "queues; off to look for a fault there.", default=True, values="bool")
    lmi_health_route: str = variable(parse.one_of("liveness", "readiness"), "What /health says: "
        "`liveness` as with `vllm serve`, `readiness` as /ping.", default="liveness",
        values="liveness, readiness")
    lmi_open_signals: str = variable(parse.one_of("auto", "on", "off"), "Metrics, the list of "
        "models and the two render routes need no key, for routers; auto: on the management "
        "address only.", default="auto", values="auto, on, off")
    lmi_console: str = variable(parse.one_of("auto", "on", "off"),
        "The web console; auto: on loopback, or when a key is set.", default="auto",
        values="auto, on, off")
    hf_token: str | None = variable(parse.any_text, "Token for the Hugging Face hub. The engine "
        "argument hf_token (--hf-token) comes before it.")
    hugging_face_hub_token: str | None = variable(parse.any_text, "Read when HF_TOKEN is unset.")
    hf_home: str | None = variable(parse.any_text, "The hub library's cache.", values="path")
    hf_endpoint: str | None = variable(parse.any_text, "Another hub.", values="URL")
    hf_hub_offline: str | None = variable(parse.any_text, "Use only what the cache holds.",
        values="bool")
    hf_hub_enable_hf_transfer: str | None = variable(parse.any_text,
        "Means HF_XET_HIGH_PERFORMANCE today.", values="bool")
    sagemaker_default_invocations_accept: str | None = variable(parse.any_text,
        "Accept of requests to /invocations and the like that bring none, or */*.")
    sagemaker_multi_model: bool | None = variable(parse.java_true,
        "Start without a model and wait for POST /models.", values="bool")
    sagemaker_health_check_override: bool | None = variable(parse.java_true,
        "As SERVING_HEALTH_CHECK_OVERRIDE.", values="bool")
    sagemaker_secure_mode: bool | None = variable(parse.java_true,
        "Checks what a model directory may bring.", values="bool")
    allow_request_handler_override: bool = variable(parse.java_true, "A request's `handler` "
        "property is accepted, without effect, instead of 400.", default=False, values="bool")
    opt_out_tracking: str | None = variable(parse.any_text, "There is no tracking to opt out of.")
    djl_cache_dir: str | None = variable(parse.any_text,
        "Root of the cache when SERVING_DOWNLOAD_DIR is unset.", values="path")
    djl_offline: str | None = variable(parse.any_text, "Install requirements without an index.",
        values="bool")
    # fmt: on
