"""Run by an interpreter with the SageMaker SDK: print the requests that an example makes, as JSON.

    python sagemaker_recording.py with_sdk_v2.py

Nothing is sent: botocore validates and serialises each request as always, and is handed an answer
made of the output shape's required members.
"""

import datetime
import importlib.util
import io
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import boto3
import botocore.response

ROWS = b'{"index":0,"token":{"id":1,"text":" a"}}\n{"index":0,"token":{"id":2,"text":" b"}}\n'
ANSWER = b'{"generated_text":" Paris."}'


class Recorder:
    """What a session's clients asked for, in order."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.latest: dict[str, Any] = {}

    def session(self) -> boto3.Session:
        """Return a boto3 session whose clients record and never send."""
        session = boto3.Session("test", "test", region_name="us-east-1")
        session.events.register("provide-client-params", self.record)
        session.events.register("before-call", self.answer)
        return session

    def record(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        """Keep what changes something or asks the model."""
        self.latest = params
        if not model.name.startswith(("Describe", "List", "Get")):
            shown = {
                name: value.decode() if isinstance(value, bytes) else value
                for name, value in params.items()
            }
            self.requests.append({"operation": model.name, "request": shown})

    def asked_for(self, operation: str) -> bool:
        """Whether a request of that operation was made."""
        return any(one["operation"] == operation for one in self.requests)

    def answer(self, model: Any, params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
        """Return an answer with what the operation's output must have."""
        if model.name == "DescribeEndpoint" and not self.asked_for("CreateEndpoint"):
            error = {"Code": "ValidationException", "Message": "Could not find endpoint"}
            return SimpleNamespace(status_code=400, headers={}, content=b""), {"Error": error}
        body = {"ResponseMetadata": {"HTTPStatusCode": 200}} | self.value_of(model.output_shape, "")
        if model.name == "InvokeEndpointWithResponseStream":
            # Two parts that end inside a row, as the service cuts them.
            body["Body"] = [{"PayloadPart": {"Bytes": part}} for part in (ROWS[:30], ROWS[30:])]
        elif model.name == "InvokeEndpoint":
            body["Body"] = botocore.response.StreamingBody(io.BytesIO(ANSWER), len(ANSWER))
        return SimpleNamespace(status_code=200, headers={}, content=b""), body

    def value_of(self, shape: Any, name: str) -> Any:
        """Return the least value of an output shape: names as asked for, statuses well."""
        if shape.type_name == "structure":
            wanted = set(shape.required_members) | {"ContentType"} & set(shape.members)
            wanted |= {one for one in shape.members if one.endswith("Status")}
            return {one: self.value_of(shape.members[one], one) for one in sorted(wanted)}
        if shape.type_name == "string":
            healthy = "InService" if name.endswith("Status") else "application/json"
            return self.latest.get(name, healthy)
        simple = {"list": [], "map": {}, "integer": 1, "long": 1, "boolean": True, "float": 1.0}
        if shape.type_name == "timestamp":
            return datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        return simple.get(shape.type_name, b"")


def load(path: Path) -> ModuleType:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Print every case's requests."""
    stdout, sys.stdout = sys.stdout, sys.stderr  # what the example and the SDK print
    example = load(Path(sys.argv[1]))
    time.sleep = lambda _: None  # the SDK's between two looks at an endpoint
    found = {}
    for name, case in example.CASES.items():
        recorder = Recorder()
        session: Any = recorder.session()
        if hasattr(example, "sagemaker"):
            session = example.sagemaker.Session(session, default_bucket="my-bucket")
        case(session)
        found[name] = recorder.requests
    stdout.write(json.dumps(found, indent=1) + "\n")
    stdout.flush()


if __name__ == "__main__":
    main()
