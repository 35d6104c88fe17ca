"""LMI's `inputs`, and vLLM's own bodies, for models that embed, classify or rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import orjson

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.lmi import NAMES_OF_ADAPTERS
from lmi_vllm.inference.request.parameters import UnreadNames
from lmi_vllm.inference.response.openai_events import lmi_reply
from lmi_vllm.messages import POOLING_KINDS, OpenAIReply, Reply, ServingProfile

# The kind of call that vLLM dispatches by the fields of its body.
INVOCATIONS: Final = "invocations"
_LMI_FIELDS: Final = frozenset({"inputs", "parameters", "stream", "adapters", "model"})
# LMI's parameters of an embedding -> vLLM's fields.
_PARAMETERS: Final[Mapping[str, tuple[str, type]]] = MappingProxyType(
    {
        "normalize": ("use_activation", bool),
        "dimensions": ("dimensions", int),
        "truncate": ("truncate_prompt_tokens", int),
    }
)


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """The handler of vLLM to call and its body; with `is_vectors` the answer has LMI's shape."""

    kind: str
    body: Mapping[str, Any]
    is_vectors: bool = False


def parse_pooling_request(
    payload: Mapping[str, Any],
    profile: ServingProfile,
    is_adapter: Callable[[str], bool],
    unread: UnreadNames,
) -> PoolingRequest:
    """Return the request of a payload on a model that does not generate.

    Beside `inputs` a `model` counts if it names an adapter; others were checked before.

    Raises:
        PayloadError: it asks for generation, or for nothing that such a model does.
    """
    kind = POOLING_KINDS.get(profile.task, "pooling")
    if "inputs" not in payload and (request := _vllm_request(kind, payload)):
        return request
    if payload.get("stream"):
        raise PayloadError(f"stream: answers of a model for {profile.task} are not streamed")
    request = _lmi_request(kind, payload, profile, unread)
    model = payload.get("model")
    if isinstance(model, str) and is_adapter(model):
        return replace(request, body={**request.body, "model": model})
    return request


def _vllm_request(kind: str, payload: Mapping[str, Any]) -> PoolingRequest | None:
    """Return the request of a payload in vLLM's own words, None of one that has none of them."""
    if "prompt" in payload and not payload.keys() & {"input", "messages"}:
        raise PayloadError(
            f"prompt: this model does not generate text, it is served for {kind}; "
            'send {"inputs": "text"} or a list of texts'
        )
    return PoolingRequest(INVOCATIONS, payload) if payload.keys() - _LMI_FIELDS else None


def vectors_reply(answer: OpenAIReply) -> Reply:
    """Return LMI's array of vectors out of vLLM's embeddings, one per input, in their order.

    Raises:
        LmiError: vLLM refused; its error object, as the error of ours that has its meaning.
    """
    if answer.status != 200:  # noqa: PLR2004 (success)
        return lmi_reply(answer)
    items = sorted(orjson.loads(answer.body)["data"], key=lambda item: int(item["index"]))
    vectors = [item["embedding"] for item in items]
    return Reply(200, "application/json", orjson.dumps(vectors) + b"\n")


def _lmi_request(
    kind: str, payload: Mapping[str, Any], profile: ServingProfile, unread: UnreadNames
) -> PoolingRequest:
    body: dict[str, Any] = {"input": _texts(payload.get("inputs", ""))}
    if "adapters" in payload:
        body["adapters"] = payload["adapters"]
    if kind == "embeddings":
        body["use_activation"] = profile.normalize
    body |= pooling_parameters(payload.get("parameters"), unread)
    return PoolingRequest(kind, body, is_vectors=kind == "embeddings")


def _texts(inputs: object) -> list[str]:
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, list) and inputs and all(isinstance(item, str) for item in inputs):
        return inputs
    raise PayloadError("inputs: expected text or a list of texts")


def pooling_parameters(given: object, unread: UnreadNames) -> dict[str, Any]:
    """Return vLLM's fields for LMI's parameters of an embedding; the others go to `unread`.

    Raises:
        PayloadError: a parameter of another type.
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise PayloadError("parameters: expected an object")
    unread.warn(given.keys() - _PARAMETERS.keys() - {*NAMES_OF_ADAPTERS})
    fields: dict[str, Any] = {}
    for name, (field, kind) in _PARAMETERS.items():
        if name not in given:
            continue
        value = given[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            wanted = "true or false" if kind is bool else "a whole number"
            raise PayloadError(f"parameters.{name}: expected {wanted}")
        fields[field] = value
    return fields
