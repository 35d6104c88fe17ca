"""The table of operations behind /openapi.json and /docs: each route's bodies and answers.

A route that is not here fails `tests/unit/features/api_docs/test_openapi.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.errors import Dialect

JSON: Final = "application/json"
JSONLINES: Final = "application/jsonlines"
SSE: Final = "text/event-stream"
PLAIN: Final = "text/plain"

HEALTH, INFERENCE, OPENAI = "Health", "Inference", "OpenAI"
MODELS, ADAPTERS, SERVER = "Models", "Adapters", "Server"
KSERVE: Final = "KServe"


@dataclass(frozen=True, slots=True)
class TgiForm:
    """TGI's body and answer of an operation with tgi_compat, as names of components."""

    takes: str
    answers: str
    example: Any


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    `takes` and `answers` name components, or a kind of OpenAI call after `openai:`; `answers` by
    content type. `statuses` are those it may answer besides `status` and the errors of its dialect.
    """

    method: str
    path: str
    tag: str
    summary: str
    answers: Mapping[str, str]
    takes: str = ""
    example: Any = None
    answer_example: Any = None
    query: tuple[str, ...] = ()  # names of QUERY_PARAMETERS
    status: int = 200
    statuses: tuple[int, ...] = ()
    examples: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    is_tgi: bool = False  # with tgi_compat only
    tgi_form: TgiForm | None = None
    is_open: bool = False  # answered without a key
    dialect: Dialect | None = None  # whose statuses errors have; None: the path's
    error: str = ""  # the component that errors are; "": the dialect's


QUERY_PARAMETERS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "limit": {"schema": {"type": "integer"}, "description": "Entries on a page, 1 to 100."},
        "next_page_token": {
            "schema": {"type": "integer", "minimum": 0, "maximum": 1000000},
            "description": "Where the page begins: `nextPageToken` of the one before.",
        },
        "model_name": {
            "schema": {"type": "string"},
            "description": "The model; needed only where none was loaded at the start.",
        },
        "url": {
            "schema": {"type": "string"},
            "description": "Folder, hub id, or file: or S3 URL of the model.",
        },
        "synchronous": {
            "schema": {"type": "boolean"},
            "description": "Answer when the model is loaded; else at once, with 202.",
        },
        "min_worker": {"schema": {"type": "integer", "minimum": 0}, "description": "A figure."},
        "max_worker": {"schema": {"type": "integer", "minimum": 0}, "description": "A figure."},
        "level": {
            "schema": {"enum": ["trace", "debug", "info", "warn", "error", "fatal", "off"]},
            "description": "Lines below it are left out; without one, info.",
        },
        "name": {"schema": {"type": "string"}, "description": "The adapter's name."},
        "src": {
            "schema": {"type": "string"},
            "description": "Folder, .tar.gz, or file: or S3 URL of the adapter.",
        },
        "preload": {"schema": {"type": "boolean"}, "description": "Load it now."},
        "pin": {"schema": {"type": "boolean"}, "description": "Never evict it."},
        "wait": {
            "schema": {"type": "boolean"},
            "description": "Answer when every replica that shares `option.adapters_state` has it; "
            "202 after 30 s names those that have not.",
        },
    }
)
PATH_PARAMETERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": "Name of the served model, as in GET /models.",
        "version": "Version of the model; there is one.",
        "name": "Name of the adapter.",
        "action": "What to do: `update`.",
    }
)

_ROWS: Final = MappingProxyType({JSON: "Inference", JSONLINES: "Stream", SSE: "Stream"})
_GENERATE: Final = {
    "generate": {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 30}},
    "stream": {
        "inputs": "The moon is",
        "parameters": {"max_new_tokens": 5, "details": True},
        "stream": True,
    },
    "several prompts": {"inputs": ["The moon is", "The river runs"]},
    "chat": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "completion": {"prompt": "The capital of France is", "max_tokens": 8},
}
_GENERATED: Final = {"generated_text": " Paris. The city lies on the river Seine."}
_READY: Final = {"model": {"status": "Healthy"}}
_ADAPTER: Final = {"name": "capitals", "src": "/adapters/capitals", "preload": True, "pin": False}


def _health(path: str, summary: str, answer: str, example: object) -> tuple[Operation, ...]:
    return tuple(
        Operation(
            method,
            path,
            HEALTH,
            summary,
            {JSON: answer},
            answer_example=example,
            statuses=(503,),
            is_open=True,
        )
        for method in ("get", "post")
    )


def _inference(path: str, summary: str) -> tuple[Operation, ...]:
    return (
        Operation(
            "post",
            path,
            INFERENCE,
            summary,
            _ROWS,
            takes="Invocation",
            examples=_GENERATE,
            answer_example=_GENERATED,
        ),
        _options(path, INFERENCE),
    )


def _openai(
    path: str, kind: str, summary: str, example: object, tgi_form: TgiForm | None = None
) -> Operation:
    streams = {SSE: "Stream"} if tgi_form is None else {}
    return Operation(
        "post",
        path,
        OPENAI,
        summary,
        {JSON: f"openai:{kind}", **streams},
        takes=f"openai:{kind}",
        example=example,
        statuses=(404, 422),
        tgi_form=tgi_form,
        is_tgi=tgi_form is not None,
    )


def _tgi(
    path: str, summary: str, answer: str | None, *, streams: bool = False
) -> tuple[Operation, ...]:
    """Return one of TGI's generating routes; those that may stream can be asked for jsonlines."""
    answers = {JSON: answer} if answer else {}
    rows = {SSE: "Stream", JSONLINES: "Stream"} if streams else {}
    example = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}
    post = Operation(
        "post", path, INFERENCE, summary, {**answers, **rows}, takes="TgiRequest",
        example=example, is_tgi=True,
    )  # fmt: skip
    options = replace(_options(path, INFERENCE), is_tgi=True)
    return (post,) if path == "/" else (post, options)


def _options(path: str, tag: str) -> Operation:
    return Operation("options", path, tag, "An empty object.", {JSON: "Nothing"}, answer_example={})


def _adapters(prefix: str) -> tuple[Operation, ...]:
    one = prefix + "/{name}"
    status = {JSON: "AdapterStatus"}
    operations = (
        Operation(
            "get",
            prefix,
            ADAPTERS,
            "The registered adapters, by name, a page at a time.",
            {JSON: "AdapterPage"},
            query=("limit", "next_page_token"),
            answer_example={"adapters": [_ADAPTER]},
        ),
        Operation(
            "post",
            prefix,
            ADAPTERS,
            "Register an adapter.",
            status,
            takes="NewAdapter",
            query=("name", "src", "preload", "pin", "wait"),
            statuses=(202,),
            example={"name": "capitals", "src": "/adapters/capitals"},
            answer_example={"status": "Adapter capitals registered"},
        ),
        Operation(
            "get",
            one,
            ADAPTERS,
            "One adapter.",
            {JSON: "Adapter"},
            answer_example=_ADAPTER,
        ),
        Operation(
            "delete",
            one,
            ADAPTERS,
            "Unregister an adapter, after its last request.",
            status,
            query=("wait",),
            statuses=(202,),
            answer_example={"status": "Adapter capitals unregistered"},
        ),
        Operation(
            "post",
            one + "/{action}",
            ADAPTERS,
            "Update an adapter (action `update`): other files, or pinned or not.",
            status,
            takes="AdapterChange",
            query=("src", "preload", "pin", "wait"),
            statuses=(202,),
            example={"pin": True},
            answer_example={"status": "Adapter capitals updated"},
        ),
    )
    return operations


def _kserve(
    path: str,
    summary: str,
    answers: str,
    answer_example: object,
    method: str = "get",
    **more: Any,
) -> Operation:
    return Operation(
        method,
        path,
        KSERVE,
        summary,
        {JSON: answers},
        answer_example=answer_example,
        dialect=Dialect.OPENAI,
        error="KServeError",
        **more,
    )


def _kserve_model(path: str, version: str) -> tuple[Operation, ...]:
    """Return the routes of a model, or of a version of it."""
    texts = {"name": "inputs", "shape": [1], "datatype": "BYTES", "data": ["The moon is"]}
    answer = {"name": "generated_text", "shape": [1], "datatype": "BYTES", "data": [" a ball"]}
    shape = {"datatype": "BYTES", "shape": [-1]}
    return (
        _kserve(
            path,
            f"What the model{version} takes and answers.",
            "KServeModel",
            {
                "name": "model",
                "platform": "vllm",
                "inputs": [{"name": "inputs", **shape}],
                "outputs": [{"name": "generated_text", **shape}],
            },
        ),
        _kserve(
            f"{path}/ready",
            f"Whether the model{version} answers.",
            "KServeReady",
            {"name": "model", "ready": True},
            is_open=True,
            statuses=(404, 503),
        ),
        _kserve(
            f"{path}/infer",
            f"Texts to texts, or to vectors{version and ' (any version)'}.",
            "KServeAnswer",
            {"model_name": "model", "id": "42", "outputs": [answer]},
            "post",
            takes="KServeRequest",
            example={"id": "42", "inputs": [texts], "parameters": {"max_new_tokens": 3}},
        ),
    )


_TGI_TOKENIZE: Final = TgiForm("TgiTokenize", "TgiTokens", {"inputs": "The moon"})

OPERATIONS: Final[tuple[Operation, ...]] = (
    *_health("/ping", "Readiness, and the phase of a start.", "Health", _READY),
    *_health("/ready", "As /ping.", "Health", _READY),
    *_health(
        "/health",
        "As of `vllm serve`: readiness until the model is ready for the first time, then liveness.",
        "Health",
        _READY,
    ),
    *_health(
        "/live",
        "Liveness: whether the process can still become ready.",
        "Liveness",
        {"status": "Healthy"},
    ),
    _options("/", SERVER),
    Operation("get", "/", SERVER, "A page with links, for a browser.", {"text/html": "Text"}),
    *_inference(
        "/invocations",
        "Answer a payload of any family: inputs, prompt, messages; on embedding models inputs, "
        "input, query with documents, text_1 with text_2.",
    ),
    *_inference("/predictions/{model}", "As /invocations, on a model by its name."),
    *_inference("/predictions/{model}/{version}", "As /invocations, on a version of a model."),
    *_inference("/models/{model}/invoke", "As /invocations: SageMaker's multi-model path."),
    *_tgi(
        "/", "TGI's compatible route: an array of one, or a stream.", "Generations", streams=True
    ),
    *_tgi("/generate", "TGI's answer to one prompt.", "Generation"),
    *_tgi("/generate_stream", "TGI's stream: an event per token.", None, streams=True),
    Operation(
        "get",
        "/info",
        INFERENCE,
        "TGI's description of the model and its limits.",
        {JSON: "TgiInfo"},
        is_tgi=True,
    ),
    Operation(
        "post",
        "/chat_tokenize",
        INFERENCE,
        "TGI's text and tokens of a chat, as the model's template makes them.",
        {JSON: "TgiChatTokens"},
        "openai:chat/completions",
        {"messages": [{"role": "user", "content": "The moon"}]},
        is_tgi=True,
    ),
    _openai(
        "/v1/chat/completions",
        "chat/completions",
        "Chat, as vLLM answers it.",
        {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    ),
    _openai(
        "/v1/completions",
        "completions",
        "A completion, as vLLM answers it.",
        {"prompt": "The capital of France is", "max_tokens": 8},
    ),
    _openai(  # without TGI's form vLLM describes it
        "/tokenize", "tokenize", "A text's tokens, as vLLM.", {"prompt": "The moon"}, _TGI_TOKENIZE
    ),
    Operation(
        "get",
        "/v1/models",
        OPENAI,
        "The served model and its adapters.",
        {JSON: "openai:models"},
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        ADAPTERS,
        "vLLM's route that loads an adapter.",
        {PLAIN: "Text"},
        takes="LoadLora",
        example={"lora_name": "capitals", "lora_path": "/adapters/capitals"},
        answer_example="Success: LoRA adapter 'capitals' added successfully.",
        statuses=(404, 507),
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        ADAPTERS,
        "Unload an adapter, in vLLM's words.",
        {PLAIN: "Text"},
        takes="UnloadLora",
        example={"lora_name": "capitals"},
        answer_example="Success: LoRA adapter 'capitals' removed successfully.",
        statuses=(404,),
    ),
    Operation(
        "get",
        "/models",
        MODELS,
        "The one model, if there is one.",
        {JSON: "ModelPage"},
        answer_example={
            "models": [{"modelName": "model", "modelUrl": "/opt/ml/model", "status": "READY"}]
        },
    ),
    Operation(
        "post",
        "/models",
        MODELS,
        "Load a model into a server that started without one.",
        {JSON: "Status"},
        takes="NewModel",
        query=("url", "model_name", "synchronous"),
        example={"url": "/opt/ml/model", "model_name": "model"},
        answer_example={"status": 'Model "model" registered.'},
        statuses=(202, 404, 409, 507),
    ),
    *(
        Operation(
            "get",
            path,
            MODELS,
            "One model in detail.",
            {JSON: "ModelDescriptions"},
            answer_example=[{"workflowName": "model", "models": [{"modelName": "model"}]}],
        )
        for path in ("/models/{model}", "/models/{model}/{version}")
    ),
    Operation(
        "put",
        "/models/{model}",
        MODELS,
        "Change the number of workers that is shown. There is one engine.",
        {JSON: "Status"},
        query=("min_worker", "max_worker"),
        answer_example={
            "status": 'Workflow "model" worker scaled. New Worker configuration min workers:1 max '
            "workers:1"
        },
    ),
    Operation(
        "delete",
        "/models/{model}",
        MODELS,
        "Unload a model that POST /models loaded; the model of the start is 405.",
        {JSON: "Status"},
        answer_example={"status": 'Model or workflow "model" unregistered'},
    ),
    *_adapters("/adapters"),
    *_adapters("/models/{model}/adapters"),
    *(
        Operation(
            "get",
            path,
            SERVER,
            "Every series of the process, vLLM's among them, as Prometheus text.",
            {PLAIN: "Text"},
            answer_example="vllm:num_requests_running 0.0",
        )
        for path in ("/metrics", "/server/metrics")
    ),
    Operation(
        "post",
        "/server/logging",
        SERVER,
        "Change how much is logged.",
        {JSON: "Status"},
        query=("level",),
        answer_example={"status": "OK"},
    ),
    _kserve(
        "/v2",
        "The server and its extensions of the protocol.",
        "KServeServer",
        {"name": "lmi_vllm", "version": "0.1.0", "extensions": ["binary_tensor_data"]},
    ),
    _kserve(
        "/v2/health/live",
        "KServe's liveness probe, as /live.",
        "KServeReady",
        {"live": True},
        is_open=True,
        statuses=(503,),
    ),
    _kserve(
        "/v2/health/ready",
        "KServe's readiness probe, as /ping.",
        "KServeReady",
        {"ready": True},
        is_open=True,
        statuses=(503,),
    ),
    *_kserve_model("/v2/models/{model}", ""),
    *_kserve_model("/v2/models/{model}/versions/{version}", " of a version"),
    Operation("get", "/openapi.json", SERVER, "This description.", {JSON: "Description"}),
    Operation("get", "/docs", SERVER, "This description as a page to read.", {"text/html": "Text"}),
)
