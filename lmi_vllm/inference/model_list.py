"""vLLM's /v1/models with the adapters of our registry, loaded or not."""

from collections.abc import Iterable

import orjson

from lmi_vllm.adapters.adapter import Adapter


def with_adapters(body: bytes, adapters: Iterable[Adapter]) -> bytes:
    """Return the list with one card per adapter, in the shape of the base model's card."""
    listed = tuple(adapters)
    if not listed:
        return body
    document = orjson.loads(body)
    cards = document.setdefault("data", [])
    base = cards[0] if cards else {"object": "model"}
    cards += [
        {
            **base,
            "id": adapter.name,
            "root": adapter.src,
            "parent": base.get("id"),
            "max_model_len": None,
        }
        for adapter in listed
    ]
    return orjson.dumps(document)
