"""The tables of operations and schemas behind /openapi.json and /docs, read from `data/`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final

import yaml

from lmi_vllm.errors import Dialect
from lmi_vllm.inference.request.parameters import GenerationParameters

Schema = Mapping[str, Any]
JSON: Final = "application/json"
OPENAI: Final = "OpenAI"  # the tag of routes that vLLM answers
REFERENCE: Final = "#/components/schemas/"
# Pydantic writes a bound behind a validator function under its own name, not JSON Schema's.
_BOUNDS: Final = (
    ("ge", "minimum"),
    ("gt", "exclusiveMinimum"),
    ("le", "maximum"),
    ("lt", "exclusiveMaximum"),
)


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
    query: tuple[str, ...] = ()  # names of `query_parameters`
    status: int = 200
    statuses: tuple[int, ...] = ()
    examples: Mapping[str, Any] = field(default_factory=dict)
    is_tgi: bool = False  # with tgi_compat only
    tgi_form: TgiForm | None = None
    is_open: bool = False  # answered without a key
    dialect: Dialect | None = None  # whose statuses errors have; None: the path's
    error: str = ""  # the component that errors are; "": the dialect's


@dataclass(frozen=True, slots=True)
class OperationTable:
    """Every operation, and what the parameters that they name mean."""

    operations: tuple[Operation, ...]
    query_parameters: Mapping[str, Mapping[str, Any]]
    path_parameters: Mapping[str, str]


def read_operations() -> OperationTable:
    """Return the table of data/operations.yaml."""
    table = _read("operations.yaml")
    operations = tuple(one for row in table["operations"] for one in _operations(**row))
    return OperationTable(operations, table["query_parameters"], table["path_parameters"])


def _operations(methods: list[str], paths: list[str], **row: Any) -> Iterator[Operation]:
    if "tgi_form" in row:
        row["tgi_form"] = TgiForm(**row["tgi_form"])
    if "dialect" in row:
        row["dialect"] = Dialect(row["dialect"])
    for path in paths:
        for method in methods:
            yield Operation(method, path, **row)


def reference(name: str) -> Schema:
    """Return a reference to a component."""
    return {"$ref": REFERENCE + name}


def any_of(*schemas: Schema) -> Schema:
    """Return a schema that allows any of the given ones."""
    return {"anyOf": list(schemas)}


def own_schemas() -> dict[str, Schema]:
    """Return our components; GenerationParameters is that of the model that validates requests."""
    parameters = GenerationParameters.model_json_schema(ref_template=REFERENCE + "{model}")
    shared = parameters.pop("$defs", {})
    parameters = _with_json_schema_keywords(parameters)
    return {**_read("schemas.yaml"), **shared, "GenerationParameters": parameters}


def _with_json_schema_keywords(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_json_schema_keywords(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    keywords = dict(_BOUNDS)
    return {
        keywords.get(key, key): _with_json_schema_keywords(value) for key, value in schema.items()
    }


def _read(name: str) -> dict[str, Any]:
    text = (files(__package__) / "data" / name).read_text()
    content: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)  # ten times as fast as SafeLoader
    return content
