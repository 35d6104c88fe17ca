"""Settings of the server: written without a prefix, or as `SERVING_<NAME>`."""

from functools import partial

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import (
    ENV,
    EVERYWHERE,
    FILE,
    SERVER_LEVEL,
    Section,
    computes,
    no_effect,
    option,
    ours,
    status,
    warned_later,
    workers,
)
from lmi_vllm.errors import DEFAULT_STATUSES, Dialect, Fault

_usual = partial(DEFAULT_STATUSES.of_fault, dialect=Dialect.SERVER)


class ServerKeys(Section):
    """serving.properties without `option.`, config.properties, `SERVING_<NAME>`."""

    section = "Server"

    # fmt: off
    engine: str = option(parse.any_text, no_effect(), default="Python", written=(FILE,),
        aliases=("option.engine",), values="Python", note="LMI's engine. MPI, DeepSpeed and "
        "FasterTransformer are read as Python. Rust, OnnxRuntime and PyTorch mean a model that "
        "embeds or ranks texts.")
    translator_factory: str | None = option(parse.any_text, no_effect("vLLM reads how a model "
        "pools from its own files"), name="translatorFactory", written=(FILE,))
    job_queue_size: int = option(parse.positive_int, ours(), default=1000, written=EVERYWHERE,
        values="number >= 1", note="Most requests in flight. More are refused with the "
        "throttle code.")
    batch_size: str | None = option(parse.any_text,
        warned_later("continuous batching is always on"), written=EVERYWHERE)
    max_dynamic_batch_size: str | None = option(parse.any_text,
        warned_later("continuous batching is always on"), written=(FILE,))
    max_batch_delay: str | None = option(parse.any_text,
        no_effect("requests never wait for a batch"), aliases=("option.max_batch_delay",),
        written=EVERYWHERE)
    max_idle_time: str | None = option(parse.any_text, no_effect("there is no worker to stop"),
        aliases=("option.max_idle_time",), written=EVERYWHERE)
    file_min_workers: int | None = workers("Kept for LMI's sake: every copy runs from the start.",
        name="minWorkers")
    file_max_workers: int | None = workers("Most copies of the model.", name="maxWorkers")
    gpu_min_workers: int | None = workers("As minWorkers, on GPUs.", name="gpu.minWorkers")
    gpu_max_workers: int | None = workers("As maxWorkers, on GPUs.", name="gpu.maxWorkers")
    cpu_min_workers: int | None = workers("As minWorkers, without GPU.", name="cpu.minWorkers")
    cpu_max_workers: int | None = workers("As maxWorkers, without GPU.", name="cpu.maxWorkers")
    min_workers: int | None = option(parse.count, ours(), written=(ENV,), values="number",
        note="minWorkers where the file has none.")
    max_workers: int | None = option(parse.count, ours(), written=(ENV,), values="number",
        note="maxWorkers where the file has none.")
    load_on_devices: str = option(parse.plain_text, computes("device_ids", "data_parallel_size"),
        aliases=("option.load_on_devices",), default="*", written=EVERYWHERE,
        values="`*`, `2`, `0;2`", note="GPUs to use. One number is the first GPU. Several "
        "numbers are one copy each.")
    retry_threshold: int = option(parse.count, ours(), default=0, written=(FILE, ENV),
        values="number", note="Engine failures tolerated before the process ends.")
    inference_address: str = option(parse.address, ours(), default="http://127.0.0.1:8080",
        written=SERVER_LEVEL, values="`http://host:port`", note="Where requests are answered.")
    management_address: str | None = option(parse.address, ours(), written=SERVER_LEVEL,
        values="`http://host:port`", note="A second listener with the management routes. Unset "
        "means the same one.")
    cluster_address: str | None = option(parse.address, no_effect("there is one process"),
        written=SERVER_LEVEL)
    load_models: str = option(parse.plain_text, ours(), default="ALL", written=SERVER_LEVEL,
        values="ALL, NONE, or `[name=]url`", note="Which models of the store are served.")
    model_store: str = option(parse.plain_text, ours(), default="/opt/ml/model",
        written=SERVER_LEVEL, values="path", note="Where the model directory is.")
    max_request_size: int = option(parse.positive_human_int, ours(), default=64 << 20,
        written=SERVER_LEVEL, values="bytes", note="Largest request body.")
    chunked_read_timeout: float = option(parse.seconds, ours(), default=120, is_lenient=True,
        written=SERVER_LEVEL, values="seconds", note="Longest silence in a streamed reply.")
    cors_allowed_origin: str | None = option(parse.plain_text, ours(), written=SERVER_LEVEL,
        note="Access-Control-Allow-Origin.")
    cors_allowed_methods: str | None = option(parse.plain_text, ours(), written=SERVER_LEVEL,
        note="Access-Control-Allow-Methods.")
    cors_allowed_headers: str | None = option(parse.plain_text, ours(), written=SERVER_LEVEL,
        note="Access-Control-Allow-Headers.")
    bad_request_http_code: int = status(_usual(Fault.BAD_PARAMETER),
        "Answer to a request the server cannot read.")
    wlm_error_http_code: int = status(_usual(Fault.NOT_READY),
        "Answer while no worker is available.")
    throttle_error_http_code: int = status(_usual(Fault.OVERLOAD), "Answer above job_queue_size.")
    server_error_http_code: int = status(_usual(Fault.ENGINE), "Answer to a fault of the server.")
    timeout_http_code: int = status(400, "Declared by LMI, never used.")
    request_id_header_key: str = option(parse.plain_text, ours(), default="x-request-id",
        written=SERVER_LEVEL, note="Header that carries the request id.")
    download_dir: str | None = option(parse.plain_text, ours(), written=(ENV,), values="path",
        note="Root of the cache of stores and archives.")
    fail_fast: bool = option(parse.boolean, ours(), default=False, written=(ENV,),
        note="End with 137 as soon as retry_threshold is passed.")
    health_check_override: bool = option(parse.boolean, ours(), default=False, written=(ENV,),
        note="/ping stays 200 after engine failures.")
    shutdown_timeout: float = option(parse.seconds_or_off, ours(), default=25, written=(ENV,),
        values="seconds", note="Time requests get to end after SIGTERM.")
    features: str | None = option(parse.any_text,
        no_effect("vllm is the only feature and always on"), written=(ENV,))
    opts: str | None = option(parse.any_text, ours(), written=(ENV,),
        values="`-Dai.djl.logging.level=debug`", note="Only the log level is read from it.")
    # fmt: on
