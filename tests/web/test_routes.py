import re

import pytest

from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web.request import Routes, WebOptions
from tests.conftest import ServeScripted
from tests.web.conftest import lifecycle_of

BODY = {"inputs": "x", "parameters": {"max_new_tokens": 1}}
INFERENCE = ("/invocations", "/predictions/demo", "/predictions/demo/1", "/models/demo/invoke")
OPENAI = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("path", INFERENCE)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE"])
async def test_routes_inference_takes_post_only(
    serve: ServeScripted, path: str, method: str
) -> None:
    """Inference is POST; OPTIONS is answered without inference."""
    client = await serve()
    assert (await client.request(method, path, json=BODY)).status == 405
    assert (await client.post(path, json=BODY)).status == 200
    assert (await client.options(path)).status == 200


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_routes_openai_takes_post_only(serve: ServeScripted, path: str, method: str) -> None:
    """OpenAI's inference is POST as well."""
    client = await serve()
    assert (await client.request(method, path)).status == 405
    assert (await client.post(path, json={"prompt": "x"})).status == 200


async def test_routes_models_is_read_only(serve: ServeScripted) -> None:
    """The list of models is for reading."""
    client = await serve()
    assert (await client.get("/v1/models")).status == 200
    assert (await client.post("/v1/models")).status == 405


UNKNOWN = ("/nothing", "/ping//", "/predictions", "/predictions/", "/invocations/x")
UNKNOWN += ("/v1", "/v1/", "/v1/nothing", "/v2/models", "/cluster/x", "/workflows/x", "/ping/x")


@pytest.mark.parametrize("path", UNKNOWN)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_routes_unknown_path_is_404(serve: ServeScripted, path: str, method: str) -> None:
    """What is not served is not found, by any method."""
    assert (await (await serve()).request(method, path)).status == 404


@pytest.mark.parametrize("routes", Routes)
async def test_front_page_is_for_people(serve: ServeScripted, routes: Routes) -> None:
    """A short page on every listener, with links that lead somewhere; nothing else is there."""
    client = await serve(options=WebOptions(routes=routes))
    response = await client.get("/")
    assert (response.status, response.content_type) == (200, "text/html")
    page = await response.text()
    assert "demo: Healthy" in page
    links = re.findall(r'href="\.([^"]+)"', page)  # relative: a proxy may have added a prefix
    assert len(links) == page.count("href=")
    assert ("/ping" in links, "/metrics" in links) == (True, routes is not Routes.INFERENCE)
    for link in links:
        assert (await client.get(link)).status == 200, link
    assert (await client.head("/")).status == 200
    assert (await client.options("/")).status == 200
    for method in ("POST", "PUT", "DELETE"):
        assert (await client.request(method, "/")).status == 404


async def test_front_page_escapes_the_model_s_name(serve: ServeScripted) -> None:
    """A name is text, whatever is in it; no script could run anyway."""
    client = await serve(ServingProfile(model_name="<script>"))
    response = await client.get("/")
    assert "&lt;script&gt;" in await response.text()
    assert response.headers["Content-Security-Policy"] == "default-src 'none'"


FORM = "application/x-www-form-urlencoded"
NAMED = {
    "query": ("?model_name={}", {}, None),
    "header": ("", {"Model_Name": "{}"}, None),
    "custom attribute": ("", {"X-Amzn-SageMaker-Custom-Attributes": "model_name={}"}, None),
    "form field": ("", {"Content-Type": FORM}, "data=x&model_name={}"),
}


@pytest.mark.parametrize(("name", "status"), [("demo", 200), ("other", 404)])
@pytest.mark.parametrize(("query", "headers", "form"), NAMED.values(), ids=NAMED)
async def test_routes_model_is_named_in_four_ways(
    serve: ServeScripted,
    query: str,
    headers: dict[str, str],
    form: str | None,
    name: str,
    status: int,
) -> None:
    """A request may name its model; another than ours is not found."""
    sent = form.format(name) if form else '{"inputs":"x"}'
    headers = {key: value.format(name) for key, value in headers.items()}
    response = await (await serve()).post(
        "/invocations" + query.format(name), data=sent, headers=headers
    )
    assert response.status == status


async def test_routes_query_names_model_before_header(serve: ServeScripted) -> None:
    """The query wins over the header."""
    headers = {"model_name": "other"}
    client = await serve()
    response = await client.post("/invocations?model_name=demo", json=BODY, headers=headers)
    assert response.status == 200


async def test_routes_without_model_name_is_required(serve: ServeScripted) -> None:
    """A server without a model asks for one."""
    client = await serve(is_ready=False)
    lifecycle_of(client).remove_model()
    response = await client.post("/invocations", json=BODY)
    assert response.status == 400
    assert (await response.json())["message"] == "Parameter model_name is required."


async def test_routes_target_model_is_ignored(serve: ServeScripted) -> None:
    """SageMaker's multi-model header changes nothing here."""
    headers = {"X-Amzn-SageMaker-Target-Model": "other.tar.gz"}
    assert (await (await serve()).post("/invocations", json=BODY, headers=headers)).status == 200


async def test_routes_unknown_payload_model_is_ignored_for_inputs(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """An `inputs` payload may carry any model name."""
    response = await (await serve()).post("/invocations", json={**BODY, "model": "gpt"})
    assert response.status == 200
    assert engine.jobs[0].adapter is None


async def test_routes_custom_attributes_reach_the_engine(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """Attributes are split at ; and =, trimmed, and become properties; pieces without = are not."""
    attributes = {"X-Amzn-SageMaker-Custom-Attributes": " x-a = 1=2 ;junk; X-B=3;"}
    client = await serve()
    await client.post("/v1/completions", json={"prompt": "x"}, headers=attributes)
    seen = engine.calls[0].headers
    assert (seen["x-a"], seen["x-b"]) == ("1=2", "3")
    assert not {"junk", "x-amzn-sagemaker-custom-attributes"} & set(seen)


async def test_routes_list_answers_in_order(serve: ServeScripted, engine: ScriptedEngine) -> None:
    """A list of prompts gives a list of results in their order."""
    profile = ServingProfile(model_name="demo")
    body = {"inputs": ["one", "two", "three"], "parameters": {"max_new_tokens": 1}}
    response = await (await serve(profile)).post("/invocations", json=body)
    found = [result["generated_text"] for result in await response.json()]
    assert found == [" one", " two", " three"]
    assert len({job.request_id for job in engine.jobs}) == 3
