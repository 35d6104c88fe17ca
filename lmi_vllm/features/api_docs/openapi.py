"""The OpenAPI 3.1 description of a running server, and the routes that show it.

Requests are described by the models that validate them: ours, and those of the loaded vLLM. Before
it is loaded, OpenAI bodies are objects without further properties.
"""

import asyncio
import copy
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Self

import orjson
from aiohttp import web

from lmi_vllm._version import __version__
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import DEFAULT_STATUSES, Dialect, EngineFailureError, Fault
from lmi_vllm.features.api_docs.operations import (
    JSON,
    OPENAI,
    Operation,
    OperationTable,
    TgiForm,
    any_of,
    own_schemas,
    read_operations,
    reference,
)
from lmi_vllm.features.api_docs.page import docs_page
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.request import (
    OPENAI_ROUTES,
    OPTIONS,
    SERVICE,
    SIGNALS,
    RouteGroup,
    WebOptions,
    dialect_of,
)

OPENAPI_VERSION: Final = "3.1.0"
_OPENAI_PREFIX: Final = "openai:"
_DIALECT_ERRORS: Final[Mapping[Dialect, str]] = {
    Dialect.SERVER: "ServerError",
    Dialect.LMI: "HandlerError",
    Dialect.OPENAI: "OpenAIError",
    Dialect.TGI: "TgiError",
    Dialect.ANTHROPIC: "OpenAIError",
    Dialect.COHERE: "OpenAIError",
}
_PARAMETER_IN_PATH: Final = re.compile(r"{(\w+)}")


@dataclass(frozen=True, slots=True)
class OpenAISchemas:
    """JSON schemas of what OpenAI calls take and answer, by kind, and what these refer to."""

    requests: Mapping[str, object] = field(default_factory=dict)
    answers: Mapping[str, object] = field(default_factory=dict)
    definitions: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine | None) -> Self:
        """Return those in an engine's description; there are none before the engine."""
        if engine is None:
            return cls()
        requests, answers = {}, {}
        for path, methods in engine.openapi.get("paths", {}).items():
            kind = path.removeprefix("/v1").removeprefix("/")
            operation = methods.get("post", {})
            requests[kind] = _json_schema(operation.get("requestBody", {}))
            answers[kind] = _json_schema(operation.get("responses", {}).get("200", {}))
        return cls(
            {kind: schema for kind, schema in requests.items() if schema},
            {kind: schema for kind, schema in answers.items() if schema},
            engine.openapi.get("components", {}).get("schemas", {}),
        )


def _json_schema(described: Mapping[str, Any]) -> Mapping[str, object]:
    schema: Mapping[str, object] = described.get("content", {}).get(JSON, {}).get("schema", {})
    return schema


async def openapi(request: web.Request) -> web.Response:
    """Answer with the OpenAPI document of this server."""
    body = orjson.dumps(await _document_of(request)) + b"\n"
    return web.Response(body=body, content_type=JSON)


async def docs(request: web.Request) -> web.Response:
    """Answer with the OpenAPI document as one HTML page without external resources."""
    forwarded = request.headers.get("X-Forwarded-Proto", "")
    scheme = forwarded if forwarded in ("http", "https") else request.scheme
    prefix = request.path.removesuffix("/docs")
    page = docs_page(await _document_of(request), f"{scheme}://{request.host}{prefix}")
    return web.Response(text=page, content_type="text/html", charset="utf-8")


def _add(app: web.Application) -> None:
    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/docs", docs)


GROUP: Final = RouteGroup(_add, pages={"/docs": "how to ask it"})


async def _document_of(request: web.Request) -> dict[str, Any]:
    """Return the document, built in a thread: vLLM's schemas take a second the first time."""
    app = request.app
    return await asyncio.to_thread(build_document, app[SERVICE], app[OPTIONS])


def build_document(service: InferenceService, options: WebOptions) -> dict[str, Any]:
    """Return the OpenAPI document of a server with this service and these options."""
    engine = service.loaded_engine
    openai = OpenAISchemas.of(engine)
    schemas = {**openai.definitions, **_union_schemas(openai), **own_schemas()}
    document: dict[str, Any] = {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "lmi_vllm",
            "version": __version__,
            "description": "A model server for LMI, OpenAI and TGI clients.",
        },
        "paths": _paths(service, options, openai),
        "components": {"schemas": schemas},
    }
    document["paths"] |= _engine_paths(engine, document["paths"])
    if options.api_keys:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"key": []}]
    return document


def _engine_paths(engine: Engine | None, described: Collection[str]) -> dict[str, Any]:
    """Return the paths of the engine's own application that are not described already."""
    if engine is None or engine.http is None:
        return {}
    forwarded = {route.path for route in engine.http.routes}
    return {
        path: {method: {**operation, "tags": ["vLLM"]} for method, operation in item.items()}
        for path, item in engine.openapi.get("paths", {}).items()
        if path in forwarded and path not in described
    }


def _union_schemas(openai: OpenAISchemas) -> dict[str, Any]:
    """Return the schemas of `/invocations`: a body and an answer of any dialect."""
    kinds = ("completions", "chat/completions", "embeddings", "rerank", "score", "classify")
    own = [reference(name) for name in ("LmiRequest", "EmbeddingInputs", "PairInputs")]
    answers = [reference("Generation"), reference("Generations"), reference("Vectors")]
    return {
        "Invocation": any_of(*own, *(_openai_schema(openai.requests, kind) for kind in kinds)),
        "Inference": any_of(*answers, *(_openai_schema(openai.answers, kind) for kind in kinds)),
        "Description": {"type": "object", "description": "An OpenAPI document."},
    }


def _paths(
    service: InferenceService, options: WebOptions, openai: OpenAISchemas
) -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    table = read_operations()
    for operation in table.operations:
        if not _is_served(operation, service):
            continue
        entry: dict[str, Any] = {
            "tags": [operation.tag],
            "summary": operation.summary,
            "operationId": _operation_id(operation),
            "responses": _responses(operation, service, options, openai),
        }
        if parameters := [*_parameters(operation, service, table)]:
            entry["parameters"] = parameters
        if operation.takes:
            entry["requestBody"] = _request_body(operation, openai)
        if operation.tgi_form is not None:
            _add_tgi_form(entry, operation.tgi_form)
        is_signal = operation.method.upper() in SIGNALS.get(operation.path, ())
        if options.api_keys and (operation.is_open or (is_signal and options.has_open_signals)):
            entry["security"] = []
        paths.setdefault(operation.path, {})[operation.method] = entry
    return paths


def _is_served(operation: Operation, service: InferenceService) -> bool:
    """Whether this server has the route, given its settings and model."""
    if operation.is_tgi and not service.profile.tgi_compat:
        return False
    engine = service.loaded_engine
    return engine is None or not _lacks(engine, operation)


def _is_engine_route(operation: Operation) -> bool:
    """Whether the engine's own application answers the route."""
    return operation.tag == OPENAI and operation.path not in OPENAI_ROUTES


def _lacks(engine: Engine, operation: Operation) -> bool:
    """Whether the loaded model has no such route."""
    paths = () if engine.http is None else (route.path for route in engine.http.routes)
    return _is_engine_route(operation) and operation.path not in paths


def _add_tgi_form(entry: dict[str, Any], form: TgiForm) -> None:
    """Add TGI's body and answers to an entry."""
    content = entry["requestBody"]["content"][JSON]
    content["schema"] = any_of(content["schema"], reference(form.takes))
    content["examples"] = {
        "vllm": {"summary": "vLLM's", "value": content.pop("example")},
        "tgi": {"summary": "TGI's", "value": form.example},
    }
    responses = entry["responses"]
    overload = str(DEFAULT_STATUSES.of_fault(Fault.OVERLOAD, Dialect.TGI))
    openai_overload = str(DEFAULT_STATUSES.of_fault(Fault.OVERLOAD, Dialect.OPENAI))
    responses.setdefault(overload, copy.deepcopy(responses[openai_overload]))
    responses[overload]["description"] = _phrase(int(overload))
    for status, answer in responses.items():
        name = form.answers if status == "200" else _DIALECT_ERRORS[Dialect.TGI]
        json = answer["content"][JSON]
        json["schema"] = any_of(json["schema"], reference(name))


def _operation_id(operation: Operation) -> str:
    words = re.findall(r"\w+", operation.path)
    return "_".join((operation.method, *words))


def _parameters(
    operation: Operation, service: InferenceService, table: OperationTable
) -> Iterable[dict[str, Any]]:
    for name in _PARAMETER_IN_PATH.findall(operation.path):
        parameter = {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
            "description": table.path_parameters[name],
        }
        if name == "model":
            parameter["example"] = service.lifecycle.model_name
        if name == "action":
            parameter["schema"] = {"enum": ["update"]}
        yield parameter
    for name in operation.query:
        yield {"name": name, "in": "query", "required": False, **table.query_parameters[name]}


def _request_body(operation: Operation, openai: OpenAISchemas) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": _schema(operation.takes, openai.requests)}
    if operation.examples:
        content["examples"] = {
            name.replace(" ", "-"): {"summary": name, "value": value}
            for name, value in operation.examples.items()
        }
    elif operation.example is not None:
        content["example"] = operation.example
    # An adapter may be given by query parameters alone.
    return {"required": operation.takes != "NewAdapter", "content": {JSON: content}}


def _responses(
    operation: Operation, service: InferenceService, options: WebOptions, openai: OpenAISchemas
) -> dict[str, Any]:
    content = {
        content_type: {"schema": _schema(name, openai.answers)}
        for content_type, name in operation.answers.items()
    }
    if operation.answer_example is not None:
        next(iter(content.values()))["example"] = operation.answer_example
    answer = {"description": "The answer.", "content": content}
    answers = {operation.status: answer}
    if operation.is_open:
        answers |= {
            status: {**answer, "description": "Not ready."} for status in operation.statuses
        }
    else:
        answers |= _errors(operation, service, options)
        answers |= {
            status: {**answer, "description": _phrase(status)}
            for status in operation.statuses
            if status < HTTPStatus.MULTIPLE_CHOICES
        }
    return {str(status): answers[status] for status in sorted(answers)}


def _errors(
    operation: Operation, service: InferenceService, options: WebOptions
) -> dict[int, dict[str, Any]]:
    """Return every error status of the path's dialect, from the one table of faults."""
    by_path = dialect_of(operation.path, service.profile, options.groups)
    dialect = operation.dialect or (Dialect.OPENAI if _is_engine_route(operation) else by_path)
    statuses = set(operation.statuses)
    for fault in Fault:
        if fault is Fault.UNAUTHORIZED and not options.api_keys:
            continue
        if fault is Fault.FORBIDDEN and operation.method in ("get", "options"):
            continue
        statuses.add(service.statuses.of_fault(fault, dialect))
    if dialect is Dialect.TGI:  # a request that failed in the engine
        statuses.add(service.statuses.of(EngineFailureError(), dialect))
    names = {
        operation.error or _DIALECT_ERRORS[dialect],
        *(("ServerError",) if dialect is not Dialect.OPENAI else ()),
        *(("Detail",) if operation.tag == OPENAI and operation.takes else ()),
    }
    schema = any_of(*(reference(name) for name in sorted(names)))
    return {
        status: {"description": _phrase(status), "content": {JSON: {"schema": schema}}}
        for status in statuses
    }


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:  # a configured status may be any number
        return f"Status {status}"


def _schema(name: str, openai: Mapping[str, object]) -> Any:
    if name.startswith(_OPENAI_PREFIX):
        return _openai_schema(openai, name.removeprefix(_OPENAI_PREFIX))
    return reference(name)


def _openai_schema(openai: Mapping[str, object], kind: str) -> Any:
    return openai.get(kind, {"type": "object"})
