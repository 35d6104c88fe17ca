"""A request's content as its content type says, for handlers that read it themselves."""

from typing import Any

from lmi_vllm.inference.hooks.inputs import Input
from lmi_vllm.inference.hooks.outputs import Output

_CSV_COLUMNS = ("inputs", "question", "context")


def decode(
    inputs: Input,
    content_type: str | None,
    key: str | None = None,
    require_csv_headers: bool = True,
) -> Any:
    """Return the payload; content that is neither JSON nor text goes under `inputs`.

    Raises:
        ValueError: the content is not what its type says.
    """
    kind = content_type or ""
    if not kind:
        return inputs.get_as_json(key) if inputs.get_as_bytes(key) else {"inputs": ""}
    if "application/json" in kind:
        return inputs.get_as_json(key)
    if "text/csv" in kind:
        return _decode_csv(inputs, key, is_checked=require_csv_headers)
    if "text/plain" in kind:
        return {"inputs": [inputs.get_as_string(key)]}
    readers = {
        "image/": inputs.get_as_image,
        "tensor/npz": inputs.get_as_npz,
        "tensor/ndlist": inputs.get_as_numpy,
        "application/x-npy": inputs.get_as_numpy,
        "application/x-www-form-urlencoded": inputs.get_as_string,
    }
    found = (read for start, read in readers.items() if kind.startswith(start))
    return {"inputs": next(found, inputs.get_as_bytes)(key)}


def encode(
    outputs: Output, prediction: Any, content_type: str | None, key: str | None = None
) -> None:
    """Append a prediction in the content type that is asked for: JSON unless arrays are."""
    if content_type and "tensor/" in content_type:
        outputs.add_as_npz(prediction, key)
        outputs.add_property("Content-Type", "tensor/npz")
        return
    outputs.add_as_json(prediction, key)
    outputs.add_property("Content-Type", "application/json")


def _decode_csv(inputs: Input, key: str | None, *, is_checked: bool) -> dict[str, Any]:
    rows = inputs.get_as_csv(key)
    names = set(rows[0]) if rows else set()
    if is_checked and not names & set(_CSV_COLUMNS):
        raise ValueError(f"the CSV needs a header row with one of {', '.join(_CSV_COLUMNS)}")
    return {"inputs": [row["inputs"] for row in rows] if "inputs" in names else rows}
