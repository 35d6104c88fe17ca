"""Bodies of TGI's clients on OpenAI's routes, as TGI reads them (`tgi_compat`)."""

from collections.abc import Callable, Sequence
from typing import Any, Final

# What TGI's own examples and huggingface_hub call the model that is served, whatever it is.
TGI_NAMES: Final = ("tgi", "dummy")


def with_tgi_meaning(
    payload: dict[str, Any], served: Sequence[str], is_adapter: Callable[[str], bool]
) -> dict[str, Any]:
    """Return the payload without nulls, which TGI takes for missing, and with a served model.

    Parameters beside `inputs` are read so anyway.
    """
    if "messages" not in payload and "prompt" not in payload:
        return payload
    found = _without_nulls(payload)
    if isinstance(messages := found.get("messages"), list):
        found["messages"] = [
            _without_nulls(one) if isinstance(one, dict) else one for one in messages
        ]
    model = found.get("model")
    if model in TGI_NAMES and model not in served and not is_adapter(model):
        found["model"] = served[0]
    return found


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
