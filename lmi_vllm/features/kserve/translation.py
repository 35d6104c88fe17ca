"""An inference request of the protocol to a payload of ours, and our reply to its output tensors.

The tensor `inputs`, or else the first one, holds the texts. Every other tensor and every request
parameter is a generation parameter of LMI by its name; `adapters` chooses adapters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from lmi_vllm.errors import PayloadError
from lmi_vllm.features.kserve.tensors import (
    BYTES,
    KserveTensor,
    binary_tensor,
    json_tensor,
    read_tensors,
)
from lmi_vllm.inference.request.body import not_json

TEXT: Final = "generated_text"
DETAILS: Final = "details"
EMBEDDING: Final = "embedding"
ANSWER: Final = "answer"  # the whole body, where it is none of those above
_INPUTS: Final = "inputs"
_ADAPTERS: Final = "adapters"
_BINARY: Final = "binary_data"
_ALL_BINARY: Final = "binary_data_output"
HEADER_LENGTH: Final = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class InferRequest:
    """An inference request: our payload, and how its answer is wanted.

    `outputs` are the tensors asked for, in order (none: all of them), and whether each is binary.
    """

    id: str | None
    payload: Mapping[str, Any]
    outputs: Mapping[str, bool]
    is_binary: bool


def read_request(body: bytes, header_length: str | None, content_type: str = "") -> InferRequest:
    """Return the request in `body`, of which the JSON part has `header_length` bytes, or all.

    Raises:
        PayloadError: it is not a valid request.
    """
    length = _length(header_length, len(body))
    try:
        document = orjson.loads(body[:length])
    except orjson.JSONDecodeError as error:
        raise PayloadError(f"the {not_json(error, content_type)}") from None
    if not isinstance(document, dict):
        raise PayloadError("the body must be a JSON object with inputs")
    request_id = document.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise PayloadError("id: expected text")
    parameters = _object(document, "parameters")
    is_binary = parameters.pop(_ALL_BINARY, False) is True
    outputs = _outputs(document.get("outputs"), is_binary=is_binary)
    tensors = read_tensors(document.get("inputs"), body[length:])
    return InferRequest(request_id, _payload(tensors, parameters, outputs), outputs, is_binary)


def _length(given: str | None, whole: int) -> int:
    if given is None:
        return whole
    if not given.isdecimal() or len(given) > len(str(whole)) or int(given) > whole:
        raise PayloadError(f"{HEADER_LENGTH}: expected at most the length of the body, {whole}")
    return int(given)


def _object(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    if value is not None and not isinstance(value, dict):
        raise PayloadError(f"{name}: expected an object")
    return dict(value or {})


def _outputs(given: object, *, is_binary: bool) -> dict[str, bool]:
    if given is None:
        return {}
    is_list = isinstance(given, list) and all(isinstance(one, dict) for one in given)
    if not is_list or not all(isinstance(one.get("name"), str) for one in given):  # type: ignore[attr-defined]
        raise PayloadError("outputs: expected a list of objects with a name")
    return {
        one["name"]: _object(one, "parameters").get(_BINARY, is_binary) is True
        for one in given  # type: ignore[attr-defined]
    }


def _payload(
    tensors: list[KserveTensor], parameters: dict[str, Any], outputs: Mapping[str, bool]
) -> dict[str, Any]:
    texts = next((one for one in tensors if one.name == _INPUTS), tensors[0])
    if texts.datatype != BYTES or not texts.values:
        raise PayloadError(f"{texts.name}: expected texts, as a tensor of BYTES")
    for tensor in tensors:
        if tensor is texts:
            continue
        if tensor.name in parameters or tensor.name == texts.name:
            raise PayloadError(f"{tensor.name}: given twice")
        is_one = len(tensor.values) == 1
        parameters[tensor.name] = tensor.values[0] if is_one else list(tensor.values)
    if parameters.pop("stream", False):
        raise PayloadError("stream: this route answers at once; /invocations streams")
    if DETAILS in outputs:
        parameters.setdefault(DETAILS, True)
    payload: dict[str, Any] = {"stream": False}
    if (adapters := parameters.pop(_ADAPTERS, None)) is not None:
        payload[_ADAPTERS] = adapters
    values = texts.values
    inputs = values[0] if len(values) == 1 else list(values)
    return {**payload, _INPUTS: inputs, "parameters": parameters}


def output_tensors(body: bytes) -> list[KserveTensor]:
    """Return the tensors of an answer: texts (and details), vectors, else the body as one text."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return [_texts(ANSWER, [body.decode("utf-8", "replace")])]
    results = document if isinstance(document, list) and document else [document]
    if all(isinstance(one, dict) and isinstance(one.get(TEXT), str) for one in results):
        tensors = [_texts(TEXT, [one[TEXT] for one in results])]
        if all(DETAILS in one for one in results):
            details = [orjson.dumps(one[DETAILS]).decode() for one in results]
            tensors.append(_texts(DETAILS, details))
        return tensors
    if all(isinstance(one, list) and len(one) == len(results[0]) for one in results):
        values = tuple(number for one in results for number in one)
        if values and all(isinstance(number, (int, float)) for number in values):
            return [KserveTensor(EMBEDDING, "FP32", (len(results), len(results[0])), values)]
    return [_texts(ANSWER, [orjson.dumps(document).decode()])]


def _texts(name: str, texts: list[str]) -> KserveTensor:
    return KserveTensor(name, BYTES, (len(texts),), tuple(texts))


def infer_answer(
    head: Mapping[str, object], tensors: list[KserveTensor], request: InferRequest
) -> tuple[bytes, int | None]:
    """Return the body with `head` and the wanted tensors, and the length of a binary body's JSON.

    Raises:
        PayloadError: an output is wanted that this answer does not have.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    wanted = request.outputs or dict.fromkeys(by_name, request.is_binary)
    if missing := [name for name in wanted if name not in by_name]:
        raise PayloadError(f"outputs: there is no {missing[0]!r}, only {', '.join(by_name)}")
    parts, rest = [], b""
    for name, is_binary in wanted.items():
        part, data = json_tensor(by_name[name]), b""
        if is_binary:
            part, data = binary_tensor(by_name[name])
        parts.append(part)
        rest += data
    body = orjson.dumps({**head, "outputs": parts})
    return body + rest, len(body) if any(wanted.values()) else None
