"""JSON schemas of our own requests and answers (docs/requests.md explains them).

Those of generation parameters are not here: the pydantic model that reads them gives them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.inference.request.parameters import GenerationParameters

Schema = Mapping[str, Any]
REFERENCE: Final = "#/components/schemas/"

_TEXT: Final[Schema] = {"type": "string"}
_INTEGER: Final[Schema] = {"type": "integer"}
_NUMBER: Final[Schema] = {"type": "number"}
_FLAG: Final[Schema] = {"type": "boolean"}
_NULL: Final[Schema] = {"type": "null"}


def reference(name: str) -> Schema:
    """Return a reference to a component."""
    return {"$ref": REFERENCE + name}


def any_of(*schemas: Schema, **more: object) -> Schema:
    """Return a schema that allows any of the given ones."""
    return {"anyOf": list(schemas), **more}


def list_of(schema: Schema, **more: object) -> Schema:
    """Return the schema of an array with items of `schema`."""
    return {"type": "array", "items": schema, **more}


def _object(fields: Mapping[str, Schema], *required: str, **more: object) -> Schema:
    return {"type": "object", "properties": dict(fields), "required": list(required), **more}


_TOKEN: Final = {"id": _INTEGER, "text": _TEXT, "logprob": any_of(_NUMBER, _NULL)}
_SEQUENCE: Final = {
    "finish_reason": {"enum": ["length", "eos_token", "stop_sequence", "abort", "error"]},
    "generated_tokens": _INTEGER,
    "prefill": list_of(reference("Token")),
    "tokens": list_of(reference("Token")),
    "top_tokens": list_of(list_of(reference("Token"))),
}
_TENSOR: Final = {"name": _TEXT, "datatype": _TEXT, "shape": list_of(_INTEGER)}
_ADAPTER_NAMES: Final = any_of(_TEXT, list_of(_TEXT), _NULL)

OWN_SCHEMAS: Final[Mapping[str, Schema]] = MappingProxyType(
    {
        "LmiRequest": _object(
            {
                "inputs": any_of(
                    {"type": "string", "minLength": 1},
                    list_of({"type": "string", "minLength": 1}, minItems=1),
                ),
                "parameters": any_of(reference("GenerationParameters"), _NULL),
                "stream": any_of(_FLAG, _NULL),
                "adapters": _ADAPTER_NAMES,
                "model": _TEXT,
            },
            "inputs",
        ),
        "TgiRequest": _object(
            {
                "inputs": {"type": "string", "minLength": 1},
                "parameters": any_of(reference("GenerationParameters"), _NULL),
                "stream": any_of(_FLAG, _NULL),
            },
            "inputs",
        ),
        "TgiTokenize": _object({"inputs": _TEXT, "add_special_tokens": _FLAG}, "inputs"),
        "TgiToken": _object(
            {"id": _INTEGER, "text": _TEXT, "start": _INTEGER, "stop": _INTEGER},
            "id",
            "text",
            "start",
            "stop",
        ),
        "TgiTokens": list_of(reference("TgiToken")),
        "TgiChatTokens": _object(
            {"templated_text": _TEXT, "tokenize_response": list_of(reference("TgiToken"))},
            "templated_text",
            "tokenize_response",
        ),
        "TgiInfo": _object(
            {
                "model_id": _TEXT,
                "max_concurrent_requests": _INTEGER,
                "max_best_of": _INTEGER,
                "max_stop_sequences": _INTEGER,
                "max_input_tokens": _INTEGER,
                "max_total_tokens": _INTEGER,
                "version": _TEXT,
            },
            "model_id",
            "max_total_tokens",
        ),
        "EmbeddingInputs": _object(
            {
                "inputs": any_of(_TEXT, list_of(_TEXT, minItems=1)),
                "parameters": any_of(
                    _object({"normalize": _FLAG, "dimensions": _INTEGER, "truncate": _INTEGER}),
                    _NULL,
                ),
                "adapters": _ADAPTER_NAMES,
            },
            "inputs",
            description="On a model that embeds: one vector per input. With engine=Rust, "
            "OnnxRuntime or PyTorch the body may also be the list, and a single text gets its "
            "vector alone.",
        ),
        "TextPair": _object({"text": _TEXT, "text_pair": _TEXT}, "text", "text_pair"),
        "KeyValuePair": _object({"key": _TEXT, "value": _TEXT}, "key", "value"),
        "QueryTexts": _object(
            {"query": _TEXT, "texts": list_of(_TEXT, minItems=1)}, "query", "texts"
        ),
        "PairInputs": any_of(
            reference("TextPair"),
            reference("KeyValuePair"),
            list_of(any_of(reference("TextPair"), reference("KeyValuePair")), minItems=1),
            reference("QueryTexts"),
            description="On a model that ranks: the score of each pair. Each form may stand in "
            "`inputs`, and `parameters.truncate` beside it.",
        ),
        "Vectors": any_of(
            list_of(list_of(_NUMBER)),
            list_of(_NUMBER),
            description="One row per text or pair; one row alone for a single pair, and for a "
            "single text with engine=Rust, OnnxRuntime or PyTorch.",
        ),
        "Token": _object({**_TOKEN, "log_prob": _NUMBER, "special": _FLAG}, "id", "text"),
        "Details": _object(
            {
                **_SEQUENCE,
                "inputs": _TEXT,
                "seed": any_of(_INTEGER, _NULL),
                "input_length": _INTEGER,
                "best_of_sequences": list_of(_object({**_SEQUENCE, "generated_text": _TEXT})),
            },
            "finish_reason",
            "generated_tokens",
        ),
        "Generation": _object(
            {"generated_text": _TEXT, "details": any_of(reference("Details"), _NULL)},
            "generated_text",
        ),
        "Generations": list_of(reference("Generation")),
        "StreamRow": _object(
            {
                "index": _INTEGER,
                "token": reference("Token"),
                "generated_text": any_of(_TEXT, _NULL),
                "details": any_of(reference("Details"), _NULL),
            },
            description="One row per token; an error after the first byte is the last row.",
        ),
        "Stream": {"description": "Rows or events, each framed as the content type says."},
        "HandlerError": _object(
            {"error": _TEXT, "code": _INTEGER, "message": _TEXT}, "error", "code"
        ),
        "ServerError": _object(
            {"code": _INTEGER, "type": _TEXT, "message": _TEXT}, "code", "type", "message"
        ),
        "Detail": _object({"detail": _TEXT}, "detail", description="FastAPI's own refusal."),
        "OpenAIError": _object(
            {
                "error": _object(
                    {
                        "message": _TEXT,
                        "type": _TEXT,
                        "param": any_of(_TEXT, _NULL),
                        "code": _INTEGER,
                    },
                    "message",
                    "type",
                    "code",
                )
            },
            "error",
        ),
        "KServeError": _object({"error": _TEXT}, "error"),
        "KServeReady": _object({"name": _TEXT, "live": _FLAG, "ready": _FLAG}),
        "KServeServer": _object(
            {"name": _TEXT, "version": _TEXT, "extensions": list_of(_TEXT)},
            "name",
            "version",
            "extensions",
        ),
        "KServeModel": _object(
            {
                "name": _TEXT,
                "platform": _TEXT,
                "inputs": list_of(_object(_TENSOR, *_TENSOR)),
                "outputs": list_of(_object(_TENSOR, *_TENSOR)),
            },
            "name",
            "platform",
            "inputs",
            "outputs",
        ),
        "KServeRequest": _object(
            {
                "id": _TEXT,
                "parameters": reference("GenerationParameters"),
                "inputs": list_of(reference("KServeTensor"), minItems=1),
                "outputs": list_of(_object({"name": _TEXT, "parameters": {"type": "object"}})),
            },
            "inputs",
            description="The tensor `inputs`, or the first one, has the texts; every other is a "
            "parameter.",
        ),
        "KServeAnswer": _object(
            {"model_name": _TEXT, "id": _TEXT, "outputs": list_of(reference("KServeTensor"))},
            "model_name",
            "id",
            "outputs",
        ),
        "KServeTensor": _object(
            {**_TENSOR, "data": list_of({}), "parameters": {"type": "object"}}, *_TENSOR
        ),
        "TgiError": _object({"error": _TEXT, "error_type": _TEXT}, "error", "error_type"),
        "Health": {
            "type": "object",
            "description": "One entry for the model, by its name; none without a model.",
            "additionalProperties": _object(
                {"status": _TEXT, "phase": _TEXT, "elapsed_seconds": _NUMBER}, "status"
            ),
        },
        "Liveness": _object({"status": _TEXT}, "status"),
        "Status": _object({"status": _TEXT}, "status"),
        "AdapterStatus": _object(
            {"status": _TEXT, "unconfirmed": {"type": "object", "additionalProperties": _TEXT}},
            "status",
        ),
        "Nothing": {"type": "object", "maxProperties": 0},
        "Text": _TEXT,
        "ModelPage": _object(
            {
                "models": list_of(
                    _object(
                        {
                            "modelName": _TEXT,
                            "modelUrl": _TEXT,
                            "version": _TEXT,
                            "status": {"enum": ["READY", "PENDING", "FAILED"]},
                        },
                        "modelName",
                        "modelUrl",
                        "status",
                    )
                ),
                "nextPageToken": _TEXT,
            },
            "models",
        ),
        "ModelDescriptions": list_of(
            _object(
                {"workflowName": _TEXT, "models": list_of({"type": "object"})},
                "workflowName",
                "models",
            )
        ),
        "NewModel": _object(
            {
                "url": _TEXT,
                "model_name": _TEXT,
                "job_queue_size": {"type": "integer", "minimum": 1},
                "synchronous": _FLAG,
            },
            description="Also as query parameters, which win.",
        ),
        "Adapter": _object(
            {"name": _TEXT, "src": _TEXT, "preload": _FLAG, "pin": _FLAG, "from_store": _FLAG},
            "name",
            "src",
            "preload",
            "pin",
        ),
        "AdapterPage": _object(
            {"adapters": list_of(reference("Adapter")), "nextPageToken": _TEXT}, "adapters"
        ),
        "NewAdapter": _object(
            {"name": _TEXT, "src": _TEXT, "preload": _FLAG, "pin": _FLAG},
            description="Also as query parameters, which win.",
        ),
        "AdapterChange": _object({"src": _TEXT, "preload": _FLAG, "pin": _FLAG}),
        "LoadLora": _object(
            {"lora_name": _TEXT, "lora_path": _TEXT, "load_inplace": _FLAG},
            "lora_name",
            "lora_path",
        ),
        "UnloadLora": _object({"lora_name": _TEXT}, "lora_name"),
    }
)


# Pydantic writes a bound behind a validator function under its own name, not JSON Schema's.
_BOUNDS: Final = MappingProxyType(
    {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
)


def _with_json_schema_keywords(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_json_schema_keywords(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        _BOUNDS.get(key, key): _with_json_schema_keywords(value) for key, value in schema.items()
    }


def own_schemas() -> dict[str, Schema]:
    """Return our components; GenerationParameters is that of the model that validates requests."""
    parameters = GenerationParameters.model_json_schema(ref_template=REFERENCE + "{model}")
    shared = parameters.pop("$defs", {})
    parameters = _with_json_schema_keywords(parameters)
    return {**OWN_SCHEMAS, **shared, "GenerationParameters": parameters}
