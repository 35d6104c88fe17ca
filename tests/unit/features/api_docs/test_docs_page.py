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
    page = docs_page(DOCUMENT)
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
    assert "list of list of list of array" in docs_page(document)
