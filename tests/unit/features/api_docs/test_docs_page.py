import html
import json
import re
import shlex

from lmi_vllm.features.api_docs.page import docs_page

NASTY = "<img src=x onerror=alert(1)>"
SCHEMA = {
    "title": NASTY,
    "type": "object",
    "properties": {NASTY: {"enum": [NASTY], "description": NASTY}},
}
CONTENT = {"schema": SCHEMA, "example": {"text": NASTY}}
DOCUMENT = {
    "info": {"title": NASTY, "version": NASTY, "description": NASTY},
    "paths": {
        f"/{NASTY}": {
            "post": {
                "tags": [NASTY],
                "summary": NASTY,
                "parameters": [
                    {"name": NASTY, "in": "path", "schema": {"type": NASTY}, "description": NASTY}
                ],
                "requestBody": {"content": {"application/json": CONTENT}},
                "responses": {"200": {"description": NASTY, "content": {NASTY: CONTENT}}},
            }
        }
    },
    "components": {"schemas": {}},
}


def test_docs_page_escapes_all_it_shows() -> None:
    """Names, texts and examples of a document are text on the page, never markup."""
    page = docs_page(DOCUMENT, f"http://{NASTY}")
    assert "<img" not in page
    assert page.count("&lt;img") >= 12


def test_docs_page_shows_a_deep_type_short() -> None:
    """A type within types ends in a word instead of going on for ever."""
    deep: dict[str, object] = {"type": "string"}
    for _ in range(20):
        deep = {"type": "array", "items": deep}
    document = {**DOCUMENT, "paths": {"/x": {"get": {
        "tags": ["x"], "summary": "x", "responses": {},
        "parameters": [{"name": "p", "in": "query", "schema": deep}],
    }}}}  # fmt: skip
    assert "list of list of list of array" in docs_page(document, "http://a")


def test_examples_can_be_pasted_into_a_shell() -> None:
    """With the reader's own address and a key where one is asked for; quotes end nothing."""
    example = {"inputs": "What's this?"}
    content = {"schema": {}, "example": example}
    operation = {
        "tags": ["Inference"],
        "summary": "x",
        "requestBody": {"content": {"application/json": content}},
        "responses": {},
    }
    document = {**DOCUMENT, "paths": {"/invocations": {"post": operation}}, "security": []}
    page = html.unescape(docs_page(document, "https://a.example:8443/x"))
    (line,) = re.findall(r"<pre>(curl .*)</pre>", page)
    words = shlex.split(line)
    assert words[2] == "https://a.example:8443/x/invocations"
    assert "Authorization: Bearer $LMI_API_KEY" in words
    assert json.loads(words[-1]) == example


def test_inference_comes_first_and_health_last() -> None:
    """In whatever order the routes are described."""
    operation = {"summary": "x", "responses": {}}
    tags = ("Health", "Server", "Inference")
    paths = {f"/{tag}": {"get": {**operation, "tags": [tag]}} for tag in tags}
    page = docs_page({**DOCUMENT, "paths": paths}, "http://a")
    assert re.findall(r"<h2>(\w+)</h2>", page) == ["Inference", "Server", "Health"]
