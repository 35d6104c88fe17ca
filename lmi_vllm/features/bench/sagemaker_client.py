"""Requests through SageMaker's runtime: InvokeEndpoint and InvokeEndpointWithResponseStream.

botocore signs them (SigV4) and decodes the binary event stream. It is synchronous and cannot be
interrupted: each request has a daemon thread.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, EventStreamError
from urllib3.exceptions import HTTPError

from lmi_vllm.errors import LmiError
from lmi_vllm.features.bench.dialects import Answer, ServerDialect
from lmi_vllm.features.bench.plan import LoadPlan, LoadRequest, RequestOutcome


@dataclass(frozen=True, slots=True)
class SageMakerTarget:
    """An endpoint by name; what is None is left to botocore's own configuration."""

    endpoint: str
    dialect: ServerDialect
    model: str
    region: str | None = None
    component: str | None = None
    endpoint_url: str | None = None


class SageMakerClient:
    """Sends requests of one plan.

    Raises:
        LmiError: no region or no credentials are configured.
    """

    def __init__(self, target: SageMakerTarget, plan: LoadPlan) -> None:
        self._target = target
        self._plan = plan
        config = Config(
            retries={"total_max_attempts": 1},  # a retry would hide an error and its time
            read_timeout=plan.timeout_seconds,
            max_pool_connections=max(plan.concurrency, 256),
        )
        session = boto3.Session(region_name=target.region)
        try:
            self._runtime: Any = session.client(
                "sagemaker-runtime", endpoint_url=target.endpoint_url, config=config
            )
        except BotoCoreError as error:
            raise LmiError(f"SageMaker: {error}; --region names a region") from error
        if session.get_credentials() is None:
            raise LmiError("SageMaker: no AWS credentials in the environment or in ~/.aws")

    async def send(
        self, request: LoadRequest, outcome: RequestOutcome, now: Callable[[], float]
    ) -> None:
        """Send one request and read its answer; a failure is recorded in the outcome."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def invoke() -> None:
            try:
                self._send(request, outcome, now)
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(done.set)

        threading.Thread(target=invoke, daemon=True).start()
        await done.wait()

    def _send(
        self, request: LoadRequest, outcome: RequestOutcome, now: Callable[[], float]
    ) -> None:
        try:
            self._invoke(request, outcome, now)
        except ClientError as error:  # EventStreamError is one
            kind, text = _error_of(error)
            outcome.fail(kind, text)
        except (BotoCoreError, HTTPError, OSError) as error:
            is_timeout = "timeout" in type(error).__name__.lower()
            outcome.fail("timeout" if is_timeout else type(error).__name__, str(error))

    def _invoke(
        self, request: LoadRequest, outcome: RequestOutcome, now: Callable[[], float]
    ) -> None:
        target = self._target
        arguments: dict[str, Any] = {
            "EndpointName": target.endpoint,
            "ContentType": "application/json",
            "Body": json.dumps(target.dialect.body(request, self._plan, target.model)),
        }
        if target.component:
            arguments["InferenceComponentName"] = target.component
        answer = Answer(target.dialect, outcome, self._plan.is_streaming)
        if not self._plan.is_streaming:
            answer.feed(self._runtime.invoke_endpoint(**arguments)["Body"].read(), now())
            answer.end(now())
            return
        stream = self._runtime.invoke_endpoint_with_response_stream(**arguments)["Body"]
        for event in stream:
            if (part := event.get("PayloadPart")) is not None:
                answer.feed(part["Bytes"], now())
        answer.end(now())


def _error_of(error: ClientError) -> tuple[str, str]:
    """Return kind and message of an error; those of the model container where it sent the error."""
    response = error.response
    details = response.get("Error", {})
    code = str(details.get("Code", type(error).__name__))
    if (status := response.get("OriginalStatusCode")) is not None:
        return f"{code} {status}", str(response.get("OriginalMessage", ""))
    if isinstance(error, EventStreamError):
        code = f"{code} in the stream"
    return code, str(details.get("Message", error))
