"""Over how many devices the heads of a model can be split: vLLM gives each the same number."""

from collections.abc import Iterator, Mapping

from lmi_vllm.checks.model import head_counts, text_part
from lmi_vllm.translate.draft import ArgumentDraft


def offer_sizes(draft: ArgumentDraft) -> None:
    """Say which numbers of devices `max` may mean; any where the heads are not known."""
    heads, kv_heads = _counts(draft)
    if heads and kv_heads:
        draft.tensor_sizes = tuple(_sizes(heads, kv_heads))


def refuse_size(draft: ArgumentDraft) -> None:
    """Note an error where vLLM would refuse to split the heads: its start takes half a minute."""
    tensor, (heads, kv_heads) = draft.values.get("tensor_parallel_size"), _counts(draft)
    if isinstance(tensor, int) and heads and kv_heads and heads % tensor:
        draft.fail(
            f"tensor_parallel_size={tensor} does not divide the model's {heads} attention heads; "
            f"possible are {', '.join(map(str, _sizes(heads, kv_heads)))}",
            draft.settings.model.details.tensor_parallel_degree,
        )


def _sizes(heads: int, kv_heads: int) -> Iterator[int]:
    """The numbers of devices of which each gets as many heads, and its part of the KV heads.

    With fewer KV heads than devices each has one of them, which as many others have too.
    """
    for devices in range(1, heads + 1):
        more, fewer = max(devices, kv_heads), min(devices, kv_heads)
        if heads % devices == 0 and more % fewer == 0:
            yield devices


def _counts(draft: ArgumentDraft) -> tuple[int | None, int | None]:
    """The heads of a model that vLLM runs, with what `hf_overrides` changes."""
    if not draft.config or draft.engines.of(draft.architectures, draft.values) is not None:
        return None, None
    overrides = draft.values.get("hf_overrides")
    changes = overrides if isinstance(overrides, Mapping) else {}
    return head_counts({**text_part(draft.config), **changes})
