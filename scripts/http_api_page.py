"""The page docs/http-api.md, from the same description as /openapi.json (scripts/make_docs.py)."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

from lmi_vllm.assembly import server_parts
from lmi_vllm.features.api_docs.openapi import build_document

# The words of the page /docs, so that a type is called the same on both.
from lmi_vllm.features.api_docs.page import shapes_of, type_text
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web.request import WebOptions

INTRODUCTION: Final = """\
# HTTP API

This page is for people who write clients by hand. After it you know this server's routes with their fields, answers and errors.

Generated from the description of the routes (`lmi_vllm/features/api_docs/data/operations.yaml`) by `make docs`. Do not edit.

[How a request is answered](requests.md) says what payloads mean, what streams look like and how they end.

- [Routes of vLLM](vllm-routes.md) has those that vLLM's own application answers, which describes them itself.
- A running server has both at `/docs`, with the fields of vLLM's own bodies, and as OpenAPI at `/openapi.json`.
- With `LMI_API_KEY` every route but health, and [what routers read](listeners.md#listeners), needs `Authorization: Bearer KEY` or `x-api-key: KEY`.
- With a `management_address`, models, adapters, metrics and logging are on that address only.
- Inference routes also answer `OPTIONS`, for browsers of other origins.

## Errors

The body of an error is that of the route's dialect, and its status says whose fault it is:

| status | meaning |
| --- | --- |
"""  # noqa: E501 - lines of the page
MEANINGS: Final[Mapping[int, str]] = {
    400: "a parameter, or a body on `/v1`, cannot be used",
    401: "no key, or a wrong one (with `LMI_API_KEY`)",
    403: "a page of another web site sends the request",
    404: "no such route, model, adapter (on `/v1` and in management) or response",
    405: "the route has no such method",
    408: "the body did not arrive within `LMI_BODY_TIMEOUT`",
    409: "an adapter or a model of that name is there",
    413: "the body is larger than `max_request_size`",
    417: "an `Expect` header other than `100-continue`",
    422: "an invalid request in TGI mode; on `/v1` some of vLLM's refusals",
    424: "an invalid request on LMI's routes: the payload, an unknown adapter, a failing hook",
    429: "the queue is full, in TGI mode",
    500: "a fault of the server or of the engine",
    503: "loading, draining, the queue is full (with `Retry-After`), or the engine is gone",
    507: "no slot or memory is left for an adapter or a model",
}
TGI_NOTE: Final = "\n## With `option.tgi_compat=true`\n"
JSON: Final = "application/json"

Entry = tuple[str, str, Mapping[str, Any]]  # methods, path, operation


def http_api_page() -> str:
    """Return the page."""
    plain, tgi = (_document(is_tgi) for is_tgi in (False, True))
    extra = {path: tgi["paths"][path] for path in tgi["paths"] if path not in plain["paths"]}
    lines = [INTRODUCTION + "\n".join(f"| {code} | {why} |" for code, why in MEANINGS.items())]
    for tag, operations in _by_tag(plain["paths"]).items():
        lines.append(f"\n## {tag}\n")
        for operation in operations:
            lines += _operation(plain, operation)
    lines.append(TGI_NOTE)
    for operation in (one for group in _by_tag(extra).values() for one in group):
        lines += _operation(tgi, operation)
    lines.append("\n## Bodies\n")
    for schema in _named_shapes(plain, tgi):
        lines += _fields(schema)
    unknown = _statuses(plain) | _statuses(tgi)
    if unknown - MEANINGS.keys() - {200, 202}:
        raise SystemExit(f"http_api_page: say what {sorted(unknown - MEANINGS.keys())} mean")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _document(is_tgi: bool) -> dict[str, Any]:
    """Return the description of a server without a loaded model: the same wherever it is made."""
    profile = ServingProfile(model_name="lmi", tgi_compat=is_tgi)
    options = WebOptions(groups=server_parts().routes.groups)
    return build_document(InferenceService(RequestQueue(Lifecycle()), profile), options)


def _by_tag(paths: Mapping[str, Any]) -> dict[str, list[Entry]]:
    """Return the operations below their tags; methods that say the same of a path are one."""
    groups: dict[str, dict[tuple[str, str], Entry]] = {}
    for path, methods in paths.items():
        for method, operation in methods.items():
            if method == "options":
                continue
            group = groups.setdefault(operation["tags"][0], {})
            same = group.get((path, operation["summary"]))
            names = method.upper() if same is None else f"{same[0]}, {method.upper()}"
            group[path, operation["summary"]] = (names, path, operation)
    return {tag: list(group.values()) for tag, group in groups.items()}


def _statuses(document: Mapping[str, Any]) -> set[int]:
    operations = (one for methods in document["paths"].values() for one in methods.values())
    return {int(status) for operation in operations for status in operation["responses"]}


def _operation(document: Mapping[str, Any], entry: Entry) -> Iterator[str]:
    methods, path, operation = entry
    yield f"\n### `{methods} {path}`\n\n{operation['summary']}\n"
    parameters = [
        (f"`{one['name']}`", one["in"], type_text(one["schema"]), one.get("description", ""))
        for one in operation.get("parameters", ())
    ]
    if parameters:
        yield from table(("parameter", "in", "type", "meaning"), parameters)
    if "requestBody" in operation:
        (content,) = operation["requestBody"]["content"].values()
        names = [shape["title"] for shape in shapes_of(document, content["schema"])
                 if shape.get("properties")]  # fmt: skip
        links = [f"[{name}](#{name.lower()})" for name in dict.fromkeys(names) if name in _own()]
        yield f"\nTakes {', '.join(links) or 'an object as vLLM takes it'}.\n"
        yield from _examples(content)
    responses = operation["responses"]
    good = {code: one for code, one in responses.items() if int(code) < HTTPStatus.BAD_REQUEST}
    for code, answer in good.items():
        yield f"\nAnswers {code}: {', '.join(f'`{kind}`' for kind in answer['content'])}.\n"
        yield from _examples(answer["content"].get(JSON, {}))
    errors = [code for code in responses if code not in good]
    yield f"Errors: {', '.join(errors) or 'none'}.\n"


def _own() -> set[str]:
    return set(_document(True)["components"]["schemas"])


def _examples(content: Mapping[str, Any]) -> Iterator[str]:
    values = [one["value"] for one in content.get("examples", {}).values()]
    values += [content["example"]] if "example" in content else []
    if any(isinstance(value, dict | list) for value in values):
        texts = (json.dumps(value, ensure_ascii=False) for value in values)
        yield "```json\n" + "\n".join(texts) + "\n```\n"


def _named_shapes(*documents: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return every body that some operation takes, once, by its name."""
    found: dict[str, Mapping[str, Any]] = {}
    for document in documents:
        for entries in _by_tag(document["paths"]).values():
            for _, _, operation in entries:
                for content in operation.get("requestBody", {}).get("content", {}).values():
                    shapes = shapes_of(document, content["schema"])
                    found |= {one["title"]: one for one in shapes if one.get("properties")}
    return [found[name] for name in sorted(found)]


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n### {schema['title']}\n"
    required = schema.get("required", ())
    rows = [
        (f"`{name}`", type_text(one), "yes" if name in required else "", one.get("description", ""))
        for name, one in schema["properties"].items()
    ]
    yield from table(("field", "type", "needed", "meaning"), rows)


def cell(text: object) -> str:
    """`text` as one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """A markdown table."""
    titles = list(head)
    yield f"| {' | '.join(titles)} |"
    yield f"| {' | '.join('---' for _ in titles)} |"
    for row in rows:
        yield f"| {' | '.join(cell(part) for part in row)} |"
