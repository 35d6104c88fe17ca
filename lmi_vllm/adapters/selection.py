"""Which adapter a request names: header, then query, then `adapters`, then `model`.

An empty name is the base model (adapters-api.md 7).
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from lmi_vllm.errors import PayloadError
from lmi_vllm.messages import InferenceCall

ADAPTER_HEADER: Final = "x-amzn-sagemaker-adapter-identifier"
ADAPTER_ALIAS_HEADER: Final = "x-amzn-sagemaker-adapter-alias"
_LENGTHS_DIFFER: Final = "Number of adapters is not equal to the number of inputs"

IsAdapter = Callable[[str], bool]


def adapter_name(
    call: InferenceCall, payload: Mapping[str, Any], is_adapter: IsAdapter
) -> str | None:
    """Return the adapter of a request with one prompt; None is the base model.

    `model` counts only where it names an adapter: other values are the served model's names.

    Raises:
        PayloadError: `adapters` is not a name, or a list of more than one.
    """
    if name := _overriding(call):
        return name
    given = payload.get("adapters")
    if isinstance(given, list):
        if len(given) > 1:
            raise PayloadError(_LENGTHS_DIFFER)
        given = given[0] if given else ""
    if given is not None and not isinstance(given, str):
        raise PayloadError("adapters: expected a name or a list of names")
    if given is None:
        model = payload.get("model")
        return model if isinstance(model, str) and is_adapter(model) else None
    return given or None


def adapter_names(
    call: InferenceCall, payload: Mapping[str, Any], prompts: int, is_adapter: IsAdapter
) -> list[str | None]:
    """Return one adapter name for each of the prompts of a list.

    Raises:
        PayloadError: a list of names of another length, or of other things.
    """
    given = payload.get("adapters")
    if not isinstance(given, list) or not given or _overriding(call):
        return [adapter_name(call, payload, is_adapter)] * prompts
    if len(given) != prompts:
        raise PayloadError(_LENGTHS_DIFFER)
    if not all(isinstance(name, str) or name is None for name in given):
        raise PayloadError("adapters: expected a list of names")
    return [name or None for name in given]


def _overriding(call: InferenceCall) -> str | None:
    return call.properties.get(ADAPTER_HEADER) or call.query.get("adapter") or None
