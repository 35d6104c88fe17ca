import pytest
from multidict import CIMultiDict

from lmi_vllm.web.inference_routes import request_properties

ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
# Headers -> properties.
PROPERTIES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "none": ({}, {}),
    "lower case": ({"X-A": "1"}, {"x-a": "1"}),
    "one attribute": ({ATTRIBUTES: "a=1"}, {"a": "1"}),
    "several, trimmed": ({ATTRIBUTES: " A = 1 ; b=2;"}, {"a": "1", "b": "2"}),
    "first = divides": ({ATTRIBUTES: "a=b=c"}, {"a": "b=c"}),
    "pieces without =": ({ATTRIBUTES: "a;b=1;;c"}, {"b": "1"}),
    "no value": ({ATTRIBUTES: "a="}, {"a": ""}),
    "empty": ({ATTRIBUTES: ""}, {}),
    "beside headers": ({"X-A": "1", ATTRIBUTES: "b=2"}, {"x-a": "1", "b": "2"}),
    "text of any language": ({"x-a": "é"}, {"x-a": "é"}),
    "bytes that are no text": ({"x-a": "a\udcff"}, {"x-a": "a?"}),
}


@pytest.mark.parametrize(("headers", "properties"), PROPERTIES.values(), ids=PROPERTIES)
def test_request_properties(headers: dict[str, str], properties: dict[str, str]) -> None:
    """Headers by lower-case name, custom attributes split into their own."""
    assert request_properties(CIMultiDict(headers)) == properties
