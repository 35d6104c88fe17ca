"""The API description: complete, valid, and true to what the routes answer."""

import re
from collections import defaultdict
from typing import Any

import pytest

from lmi_vllm.errors import Fault, StatusTable
from lmi_vllm.features.api_docs.openapi import build_document
from lmi_vllm.features.api_docs.operations import read_operations
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web import sleep_route
from lmi_vllm.web.request import WebOptions
from tests.conftest import ServeScripted
from tests.support.scripted_application import DESCRIPTION, ROUTES
from tests.support.vllm_routes import script

METHODS = ("get", "post", "put", "patch", "delete", "options")
PARTS = {"model": "demo", "version": "1", "name": "a", "action": "update", "response_id": "a"}


ENGINE_S = {route.path for route in ROUTES}
TGI = ServingProfile(model_name="demo", enable_lora=True, tgi_compat=True)


def _validate(document: dict[str, Any]) -> None:
    """Hold it to the schema of OpenAPI."""
    # Its schemas are three seconds, which `make unit` does without.
    from openapi_spec_validator import OpenAPIV31SpecValidator  # noqa: PLC0415

    OpenAPIV31SpecValidator(document).validate()


async def _document(
    serve: ServeScripted, profile: ServingProfile | None = None, **options: Any
) -> dict[str, Any]:
    client = await serve(profile, **options)
    headers = {"x-api-key": "k"} if options else {}
    answer = await client.get("/openapi.json", headers=headers)
    assert answer.status == 200
    document: dict[str, Any] = await answer.json()
    return document


async def test_openapi_has_every_route_and_no_other(serve: ServeScripted) -> None:
    """What data/operations.yaml describes exists, and it describes every route."""
    client = await serve()
    routes = {route.resource.canonical for route in client.app.router.routes()}
    routes |= {route.path for route in ROUTES}  # of the engine's own application
    described = set((await _document(serve, TGI))["paths"])
    assert described - set((await _document(serve))["paths"]) == {
        "/chat_tokenize",
        "/generate",
        "/generate_stream",
        "/info",
    }
    assert routes - described == set(), (
        "describe these routes in lmi_vllm/features/api_docs/data/operations.yaml"
    )
    assert described - routes == set(), "these are described and not registered"


async def test_allow_header_names_the_described_methods(serve: ServeScripted) -> None:
    """Routes state their methods by themselves; both say the same. vLLM's have no HEAD."""
    client = await serve(TGI)
    described: dict[str, set[str]] = defaultdict(set)
    for operation in read_operations().operations:
        described[operation.path].add(operation.method.upper())
    described["/models/{model}"].remove("DELETE")  # the model of the start stays
    for path, methods in described.items():
        refused = await client.request("PATCH", path.format(**PARTS))
        head = {"HEAD"} if "GET" in methods and path not in ENGINE_S else set()
        assert set(refused.headers["Allow"].split(", ")) == methods | head, path


async def test_openapi_has_every_method_of_every_route(
    serve: ServeScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is described is not 405; every other method is."""
    monkeypatch.setattr(sleep_route, "GIVE_BACK_SECONDS", 0.01)  # nothing here puts it to sleep
    client = await serve(TGI)
    wrong = []
    for path, operations in (await _document(serve, TGI))["paths"].items():
        concrete = re.sub(r"{(\w+)}", lambda part: PARTS.get(part[1], "a"), path)
        for method in METHODS:
            status = (await client.request(method, concrete, json={})).status
            if (method, path) == ("delete", "/models/{model}"):
                continue  # 405 for the model that a server was started with
            if (status == 405) == (method in operations) and concrete != "/":
                wrong.append((method, path, status))
    assert wrong == []


@pytest.mark.parametrize(
    "options",
    [None, WebOptions(api_keys=("k",))],
    ids=["open", "with keys"],
)
async def test_openapi_is_valid(serve: ServeScripted, options: WebOptions | None) -> None:
    """The document is OpenAPI 3.1 in the eyes of its validator."""
    statuses = StatusTable({Fault.OVERLOAD: 529})
    given = {"options": options, "statuses": statuses} if options else {}
    document = await _document(serve, **given)
    assert document["openapi"] == "3.1.0"
    _validate(document)
    if options:
        assert document["security"]
        assert document["paths"]["/ping"]["get"]["security"] == []
        answers = document["paths"]["/invocations"]["post"]["responses"]
        assert {"401", "529"} <= set(answers)


async def test_openapi_has_an_example_of_every_body(serve: ServeScripted) -> None:
    """Each request body is shown by an example that the server does not refuse as malformed."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    for path, operations in (await _document(serve))["paths"].items():
        for method, operation in operations.items():
            if "requestBody" not in operation:
                continue
            (content,) = operation["requestBody"]["content"].values()
            examples = [one["value"] for one in content.get("examples", {}).values()]
            examples += [content["example"]] if "example" in content else []
            assert examples, (method, path)
            concrete = re.sub(r"{(\w+)}", lambda part: PARTS.get(part[1], "a"), path)
            for example in examples:
                answer = await client.request(method, concrete, json=example)
                assert str(answer.status) in operation["responses"], (method, path, answer.status)
                if operation["tags"] in (["Inference"], ["OpenAI"]):
                    assert answer.status == 200, (path, example)


async def test_openapi_parameters_are_those_that_validate(serve: ServeScripted) -> None:
    """The schema of `parameters` is generated: its bounds are the model's."""
    schemas = (await _document(serve))["components"]["schemas"]
    properties = schemas["GenerationParameters"]["properties"]
    assert {"max_new_tokens", "top_p", "num_beams", "guided_regex"} <= set(properties)
    number = next(one for one in properties["top_p"]["anyOf"] if one["type"] == "number")
    assert (number["exclusiveMinimum"], number["maximum"]) == (0.0, 1.0)


async def test_openapi_takes_vllm_s_schemas_from_the_engine(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """OpenAI bodies are what the loaded engine says; before there is one, plain objects."""
    schema = {"$ref": "#/components/schemas/Chat"}
    chat = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    engine.openapi = {
        "paths": {"/v1/chat/completions": {"post": chat}},
        "components": {"schemas": {"Chat": {"type": "object", "required": ["messages"]}}},
    }
    loaded = await _document(serve)
    body = loaded["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == schema
    assert loaded["components"]["schemas"]["Chat"]["required"] == ["messages"]
    client = await serve(is_ready=False)
    answer = await client.get("/openapi.json")
    assert answer.status == 200
    body = (await answer.json())["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {"type": "object"}


def test_no_route_of_vllm_is_described_by_hand() -> None:
    """Its application does it; TGI's form of `/tokenize` is ours."""
    ours = {operation.path for operation in read_operations().operations}
    answers = script("vllm_routes_page").answers().values()
    forwarded = {row["path"] for row in answers if row["by"] == "bridge"}
    assert ours & forwarded == {"/tokenize"}


async def test_openapi_describes_errors_by_dialect(serve: ServeScripted) -> None:
    """In TGI mode the inference routes refuse as TGI does."""
    client = await serve(ServingProfile(model_name="demo", tgi_compat=True))
    document = await (await client.get("/openapi.json")).json()
    answers = document["paths"]["/invocations"]["post"]["responses"]
    assert {"422", "424", "429"} <= set(answers)
    shapes = answers["422"]["content"]["application/json"]["schema"]["anyOf"]
    assert {"$ref": "#/components/schemas/TgiError"} in shapes


async def test_openapi_describes_both_forms_of_tokenize(serve: ServeScripted) -> None:
    """TGI's body, answer and errors beside vLLM's, in TGI mode only."""
    client = await serve(ServingProfile(model_name="demo", tgi_compat=True))
    document = await (await client.get("/openapi.json")).json()
    _validate(document)
    entry = document["paths"]["/tokenize"]["post"]
    content = entry["requestBody"]["content"]["application/json"]
    assert {"$ref": "#/components/schemas/TgiTokenize"} in content["schema"]["anyOf"]
    assert {"inputs": "The moon"} in [one["value"] for one in content["examples"].values()]
    for status, name in {"200": "TgiTokens", "422": "TgiError", "429": "TgiError"}.items():
        schema = entry["responses"][status]["content"]["application/json"]["schema"]
        assert {"$ref": f"#/components/schemas/{name}"} in schema["anyOf"]
    plain = (await _document(serve))["paths"]["/tokenize"]["post"]
    assert plain == {**DESCRIPTION["paths"]["/tokenize"]["post"], "tags": ["vLLM"]}


async def test_docs_page_needs_no_network_and_no_script(serve: ServeScripted) -> None:
    """The page names every route, runs no script and loads nothing."""
    client = await serve(ServingProfile(model_name="demo"))
    answer = await client.get("/docs")
    page = await answer.text()
    assert answer.content_type == "text/html"
    for path in (await _document(serve))["paths"]:
        assert path in page
    assert "<script" not in page
    assert not re.search(r"""(src|@import|url\()""", page.partition("</style>")[0])
    assert set(re.findall(r'href="([^"]*)"', page)) == {"openapi.json"}
    assert "color-scheme: light dark" in page
    origin = str(client.server.make_url("/")).rstrip("/")
    assert f"curl -s {origin}/invocations " in page
    secure = await (await client.get("/docs", headers={"X-Forwarded-Proto": "https"})).text()
    assert f"curl -s {origin.replace('http:', 'https:')}/invocations " in secure


async def test_document_of_a_server_without_a_model(serve: ServeScripted) -> None:
    """The description needs no engine."""
    client = await serve(is_ready=False)
    service = next(value for key, value in client.app.items() if key._name.endswith("service"))
    assert build_document(service, WebOptions())["paths"]
