"""Each request of config/sagemaker is one that botocore's service model takes.

Those of the SDKs are recorded (tests/golden/sagemaker): each SDK wants an environment of its own,
in which integration/sagemaker_sdk_requests.py records them again.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import botocore.loaders
import botocore.model
import botocore.validate
import pytest
from botocore import xform_name

from tests.support.assembled import load_settings

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "config" / "sagemaker"
RECORDINGS = sorted((ROOT / "tests" / "golden" / "sagemaker").glob("*.json"))
RECORDED = [
    pytest.param(one["operation"], one["request"], id=f"{path.stem}-{case}-{number}")
    for path in RECORDINGS
    for case, requests in json.loads(path.read_text()).items()
    for number, one in enumerate(requests)
]


def load_example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("with_boto3", FOLDER / "with_boto3.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = load_example()
REQUESTS = sorted(
    {pair for case in EXAMPLE.CASES.values() for pair in case} | set(EXAMPLE.INVOCATIONS),
    key=lambda pair: pair[1].__name__,
)
NAMES = [request.__name__ for _, request in REQUESTS]


@pytest.fixture(scope="module")
def operations() -> dict[str, botocore.model.OperationModel]:
    """Every operation of both services, by the name boto3 gives it."""
    loader = botocore.loaders.Loader()
    found = {}
    for service in ("sagemaker", "sagemaker-runtime"):
        described = loader.load_service_model(service, "service-2")
        model = botocore.model.ServiceModel(described, service)
        found |= {xform_name(name): model.operation_model(name) for name in model.operation_names}
    return found


@pytest.mark.parametrize(("operation", "request_of"), REQUESTS, ids=NAMES)
def test_request_is_valid(
    operations: dict[str, botocore.model.OperationModel],
    operation: str,
    request_of: Callable[[], dict[str, Any]],
) -> None:
    """Names, types, and (which botocore leaves to the service) patterns, lengths and enums."""
    check(operations[operation], request_of())


@pytest.mark.parametrize(("operation", "request_made"), RECORDED)
def test_request_of_an_sdk_is_valid(
    operations: dict[str, botocore.model.OperationModel],
    operation: str,
    request_made: dict[str, Any],
) -> None:
    """What version 2 or 3 of the SDK really made of its example."""
    check(operations[xform_name(operation)], request_made)


def test_both_sdks_show_every_case_and_ask_for_the_same() -> None:
    """The same cases as with boto3, and the same model, variant and adapter behind them."""
    assert [path.stem for path in RECORDINGS] == ["with_sdk_v2", "with_sdk_v3"]
    for path in RECORDINGS:
        cases = json.loads(path.read_text())
        assert cases.keys() == EXAMPLE.CASES.keys()
        for name, expected in EXAMPLE.CASES.items():
            made = {one["operation"] for one in cases[name]}
            wanted = {operations_name(operation) for operation, _ in expected}
            assert wanted <= made, (path.name, name)
        streams = [one for one in cases["environment"] if "Stream" in one["operation"]]
        assert json.loads(streams[0]["request"]["Body"])["stream"] is True
        adapter = next(
            one["request"]
            for one in cases["components"]
            if one["request"].get("InferenceComponentName")
            == EXAMPLE.adapter_component()["InferenceComponentName"]
        )
        assert adapter == EXAMPLE.adapter_component()


def operations_name(method: str) -> str:
    """Return the operation of a method of a client: CreateModel for create_model."""
    return "".join(word.capitalize() for word in method.split("_"))


def check(operation: botocore.model.OperationModel, request: dict[str, Any]) -> None:
    """Hold a request against the model: names and types, then what only the service refuses."""
    shape = operation.input_shape
    report = botocore.validate.ParamValidator().validate(request, shape)
    assert not report.has_errors(), report.generate_report()
    assert list(constraint_errors(request, shape, operation.name)) == []


def constraint_errors(value: Any, shape: Any, where: str) -> Iterator[str]:
    """Yield what the service itself would refuse, by the constraints its model states."""
    if shape.type_name == "structure":
        for name, inner in value.items():
            yield from constraint_errors(inner, shape.members[name], f"{where}.{name}")
    elif shape.type_name == "list":
        for inner in value:
            yield from constraint_errors(inner, shape.member, f"{where}[]")
    elif shape.type_name == "map":
        for inner in value.values():
            yield from constraint_errors(inner, shape.value, f"{where}{{}}")
    elif refusal := refusal_of(value, shape):
        yield f"{where}: {value!r} {refusal}"


def refusal_of(value: Any, shape: Any) -> str:
    """Return why the service refuses a text or a number; empty where it does not."""
    limits = shape.metadata
    if shape.type_name == "string":
        pattern = limits.get("pattern", ".*").replace(r"\p{ASCII}", r"[\x00-\x7f]")
        if not re.fullmatch(pattern, value, re.DOTALL):
            return f"does not match {pattern}"
        if shape.enum and value not in shape.enum:
            return f"is none of {shape.enum}"
        return "is too long" if len(value) > limits.get("max", 1 << 30) else ""
    if shape.type_name == "integer":
        low, high = limits.get("min", value), limits.get("max", value)
        return "" if low <= value <= high else f"is not within {low} and {high}"
    return ""


@pytest.mark.parametrize("name", ["environment_model", "component_model"])
def test_environment_holds_settings_that_exist(name: str) -> None:
    """A misspelt option would be an error here."""
    environment = getattr(EXAMPLE, name)()["PrimaryContainer"]["Environment"]
    assert not load_settings(environment | {"LMI_STRICT": "true"}).errors


def test_table_states_our_defaults() -> None:
    """The figures of the contract table are those of the option table."""
    table = (FOLDER / "README.md").read_text()
    settings = load_settings({})
    assert f"`option.predict_timeout`, {settings.model.predict_timeout:g} s" in table
    loading = settings.model.model_loading_timeout
    assert f"`option.model_loading_timeout`, {loading:g} s" in table
    drain = settings.server.shutdown_timeout
    assert f"`SERVING_SHUTDOWN_TIMEOUT`, {drain:g} s" in table
    assert settings.server.max_request_size == 64 << 20
