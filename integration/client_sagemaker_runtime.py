"""boto3's SageMaker runtime against our process, behind a proxy that speaks its protocol."""

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from integration.conftest import RunningServer
from tests.support.sagemaker_proxy import sagemaker_proxy

pytestmark = pytest.mark.vllm
REQUEST = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}
CUT_BYTES = 37  # no row has this length: parts begin and end inside rows


@pytest.fixture(scope="module")
def runtime(demo_server: RunningServer) -> Iterator[Any]:
    """The client as its users make it, but for the endpoint."""
    with sagemaker_proxy(demo_server.url, CUT_BYTES) as url:
        yield boto3.client(
            "sagemaker-runtime",
            region_name="us-east-1",
            endpoint_url=url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )


def _ask(body: object, **more: str) -> dict[str, Any]:
    text = body if isinstance(body, str) else json.dumps(body)
    return {"EndpointName": "demo", "ContentType": "application/json", "Body": text, **more}


def test_invoke_endpoint(runtime: Any) -> None:
    """The answer is the body as it was sent; custom attributes and adapters arrive."""
    answer = runtime.invoke_endpoint(**_ask(REQUEST))
    assert answer["ContentType"] == "application/json"
    whole = json.loads(answer["Body"].read())
    assert whole["generated_text"].startswith(" Paris")
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    answer = runtime.invoke_endpoint(**_ask({**chat, "temperature": 0}))
    assert json.loads(answer["Body"].read())["object"] == "chat.completion"
    loud = "X-Amzn-SageMaker-Adapter-Identifier=capitals"
    answer = runtime.invoke_endpoint(**_ask(REQUEST, CustomAttributes=loud))
    text = json.loads(answer["Body"].read())["generated_text"]
    assert text == text.upper()


def test_invoke_endpoint_with_response_stream(runtime: Any) -> None:
    """Parts say nothing of lines: put together they are the rows of the stream."""
    asked = _ask({**REQUEST, "stream": True}, Accept="application/json")
    answer = runtime.invoke_endpoint_with_response_stream(**asked)
    assert answer["ContentType"] == "application/jsonlines"
    parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
    assert len(parts) > 1
    rows = [json.loads(line) for line in b"".join(parts).splitlines()]
    whole = json.loads(runtime.invoke_endpoint(**_ask(REQUEST))["Body"].read())
    assert "".join(row["token"]["text"] for row in rows) == whole["generated_text"]
    assert rows[-1]["generated_text"] == whole["generated_text"]


def test_invoke_endpoint_error_keeps_our_text(runtime: Any) -> None:
    """What we say is in the ModelError that SageMaker makes of it."""
    for operation in (runtime.invoke_endpoint, runtime.invoke_endpoint_with_response_stream):
        with pytest.raises(ClientError) as refusal:
            operation(**_ask({"inputs": "x", "adapters": "nobody"}))
        answer = refusal.value.response
        assert answer["Error"]["Code"] == "ModelError"
        assert answer["OriginalStatusCode"] == 424
        assert "nobody" in answer["OriginalMessage"]
