"""Which adapters a request names: its header, its query, `adapters`, `parameters`, `model`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.lmi import ADAPTER_HEADER, NAMES_OF_ADAPTERS
from lmi_vllm.messages import InferenceCall, ServingProfile

_LENGTHS_DIFFER: Final = "Number of adapters is not equal to the number of inputs"
ONE_ADAPTER: Final = (
    "adapters: a list of several adapters goes with a list in `inputs`; a request with `prompt`, "
    "`messages` or `input` has one adapter for all of it"
)
_OTHER_INPUTS: Final = frozenset({"prompt", "messages", "prompt_embeds", "input"})


def with_named(
    payload: Mapping[str, Any], profile: ServingProfile, *, is_hooked: bool = False
) -> Mapping[str, Any]:
    """Return the payload with the adapter that `parameters` of LMI or TGI name as `adapters`.

    With `is_hooked` an input hook may make the `inputs` out of fields that only it knows.
    """
    parameters = payload.get("parameters")
    is_lmi = "inputs" in payload or (is_hooked and _OTHER_INPUTS.isdisjoint(payload))
    if "adapters" in payload or not is_lmi or not isinstance(parameters, dict):
        return payload
    if profile.enable_lora or profile.tgi_compat:
        for name in NAMES_OF_ADAPTERS:
            if parameters.get(name) is not None:
                return {**payload, "adapters": parameters[name]}
    return payload


def adapter_names(
    chosen: Sequence[object], payload: Mapping[str, Any], is_adapter: Callable[[str], bool]
) -> list[str | None]:
    """Return the adapter of all prompts, or one for each of a list; None is the base model.

    The first of `chosen` counts, else `model` if it names an adapter (otherwise it is a name of the
    served model). Empty text, null and an empty list mean the base model.

    Raises:
        PayloadError: `adapters` is neither a name nor a list of one name for each prompt.
    """
    if not chosen:
        model = payload.get("model")
        return [model if isinstance(model, str) and is_adapter(model) else None]
    given, inputs = chosen[0], payload.get("inputs")
    if isinstance(given, list) and given and isinstance(inputs, list):
        return _listed_names(given, len(inputs))
    if isinstance(given, list) and len(given) > 1:
        raise PayloadError(_LENGTHS_DIFFER if "inputs" in payload else ONE_ADAPTER)
    return [_single_name(given)]


def chosen_adapters(call: InferenceCall, payload: Mapping[str, Any]) -> Sequence[object]:
    """Return what the header, the query and `adapters` say, of those that are set."""
    chosen = []
    if ADAPTER_HEADER in call.properties:
        chosen.append(call.properties[ADAPTER_HEADER])
    if "adapter" in call.query:
        chosen.append(call.query["adapter"])
    if "adapters" in payload:
        chosen.append(payload["adapters"])
    return chosen


def _listed_names(given: list[Any], prompts: int) -> list[str | None]:
    if len(given) != prompts:
        raise PayloadError(_LENGTHS_DIFFER)
    if not all(isinstance(name, str) or name is None for name in given):
        raise PayloadError("adapters: expected a list of names")
    return [name or None for name in given]


def _single_name(given: object) -> str | None:
    if isinstance(given, list):
        given = given[0] if given else None
    if given is not None and not isinstance(given, str):
        raise PayloadError("adapters: expected a name or a list of names")
    return given or None
