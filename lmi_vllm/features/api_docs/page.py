"""The OpenAPI document as one HTML page without scripts and external resources, light and dark."""

import html
import json
import shlex
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, Final

from lmi_vllm.features.api_docs.operations import REFERENCE

_PARAMETERS: Final = REFERENCE + "GenerationParameters"  # shown where a body has them
_MAX_DEPTH: Final = 3  # of a type's text; a deeper type is shown by its bare name
_MAX_TYPE_LENGTH: Final = 120  # characters of a type's text


_FIRST: Final = ("Inference", "OpenAI", "Adapters", "Models")  # what most readers came for
_LAST: Final = "Health"
_KEY: Final = "Authorization: Bearer $LMI_API_KEY"


def docs_page(document: Mapping[str, Any], url: str) -> str:
    """Return the HTML page of an OpenAPI document; `url` is where its reader reached the server."""
    info = document["info"]
    style = (files(__package__) / "data" / "page.css").read_text()
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_escape(info['title'])} API</title><style>\n{style}</style></head><body>",
        f"<h1>{_escape(info['title'])} <small>{_escape(info['version'])}</small></h1>",
        f"<p>{_escape(info['description'])} The same for machines: "
        '<a href="openapi.json">openapi.json</a>.</p>',
    ]
    if "security" in document:
        parts.append(
            "<p>Every route but the health ones wants <code>Authorization: Bearer &lt;key&gt;"
            "</code> or <code>x-api-key: &lt;key&gt;</code>.</p>"
        )
    parts += _sections(document, _curl_begin(document, url))
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _curl_begin(document: Mapping[str, Any], url: str) -> tuple[str, str]:
    """Return the address of every example, and the options before its body."""
    options = "-H 'Content-Type: application/json'"
    return url, f'-H "{_KEY}" {options}' if "security" in document else options


def _sections(document: Mapping[str, Any], curl: tuple[str, str]) -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            text = _operation(document, path, method, operation, curl)
            by_tag.setdefault(operation["tags"][0], []).append(text)
    others = [tag for tag in by_tag if tag not in (*_FIRST, _LAST)]
    for tag in (*_FIRST, *others, _LAST):
        if tag in by_tag:
            yield f"<h2>{_escape(tag)}</h2>"
            yield from by_tag[tag]


def _operation(
    document: Mapping[str, Any],
    path: str,
    method: str,
    operation: Mapping[str, Any],
    curl: tuple[str, str],
) -> str:
    parts = [
        f"<details><summary><b>{method.upper()}</b> <code>{_escape(path)}</code> "
        f'<span class="note">{_escape(operation["summary"])}</span></summary>'
    ]
    if "parameters" in operation:
        rows = (
            (f"{one['name']} ({one['in']})", type_text(one["schema"]), one.get("description", ""))
            for one in operation["parameters"]
        )
        parts.append(_table(("parameter", "type", ""), rows))
    if "requestBody" in operation:
        (content,) = operation["requestBody"]["content"].values()
        parts.append(_body(document, content))
        parts.append(_curl(path, content, curl))
    parts.append(_table(("status", "content type", ""), _answers(operation["responses"])))
    for answer in operation["responses"].values():
        for content in answer["content"].values():
            if "example" in content:
                parts.append(_code(content["example"]))
    parts.append("</details>")
    return "".join(parts)


def _answers(responses: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for status, answer in responses.items():
        yield status, ", ".join(answer["content"]), answer["description"]


def _body(document: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return a table of fields for each object schema of a body."""
    parts = []
    for schema in shapes_of(document, content["schema"]):
        fields = schema.get("properties", {})
        required = schema.get("required", ())
        rows = (
            (name + (" *" if name in required else ""), type_text(one), one.get("description", ""))
            for name, one in fields.items()
        )
        title = schema.get("title") or schema.get("description") or "body"
        if fields:
            parts.append(
                f"<details><summary>{_escape(title)}</summary>"
                f"{_table(('field (* required)', 'type', ''), rows)}</details>"
            )
    return "".join(parts)


def shapes_of(
    document: Mapping[str, Any], schema: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield every object schema of a body; `parameters` come after the object that holds them."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(REFERENCE)
        target = document["components"]["schemas"][name]
        yield from shapes_of(document, {"title": name, **target})
    elif "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from shapes_of(document, one)
    else:
        yield schema
        for field in schema.get("properties", {}).values():
            if any(one.get("$ref") == _PARAMETERS for one in field.get("anyOf", ())):
                yield from shapes_of(document, {"$ref": _PARAMETERS})


def type_text(schema: Mapping[str, Any], depth: int = 0) -> str:
    """Return a short name of the type that a schema allows."""
    if "$ref" in schema:
        return str(schema["$ref"].removeprefix(REFERENCE))
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if depth < _MAX_DEPTH and (options := schema.get("anyOf") or schema.get("oneOf")):
        texts = dict.fromkeys(type_text(one, depth + 1) for one in options)
        text = " | ".join(texts)
        return text if len(text) <= _MAX_TYPE_LENGTH else text[:_MAX_TYPE_LENGTH] + " …"
    if schema.get("type") == "array" and depth < _MAX_DEPTH:
        return f"list of {type_text(schema.get('items', {}), depth + 1)}"
    return str(schema.get("type", "any"))


def _curl(path: str, content: Mapping[str, Any], curl: tuple[str, str]) -> str:
    url, options = curl
    examples = [one["value"] for one in content.get("examples", {}).values()]
    if "example" in content:
        examples.append(content["example"])
    lines = [
        f"curl -s {shlex.quote(f'{url}{path}')} {options} "
        f"-d {shlex.quote(json.dumps(example, ensure_ascii=False))}"
        for example in examples
    ]
    return f"<pre>{_escape(chr(10).join(lines))}</pre>" if lines else ""


def _code(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    return f"<pre>{_escape(text)}</pre>"


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    titles = "".join(f"<th>{_escape(title)}</th>" for title in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{titles}</tr>{body}</table>"


def _escape(text: object) -> str:
    return html.escape(str(text))
