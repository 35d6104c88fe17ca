"""Over how many devices attention heads can be split: vLLM gives each the same number of them."""

from collections.abc import Mapping

from lmi_vllm.checks.model import engine_for, text_part
from lmi_vllm.extras.validate.weights import number_of
from lmi_vllm.translate.draft import ArgumentDraft


def head_counts(body: Mapping[str, object]) -> tuple[int | None, int | None]:
    """Return the attention heads and the KV heads of a decoder; None where they are not stated."""
    heads = number_of(body, "num_attention_heads", "n_head", "num_heads")
    return heads, number_of(body, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def divides(heads: int, kv_heads: int, devices: int) -> bool:
    """Whether each device gets as many heads, and its part of the KV heads or one of them."""
    more, fewer = max(devices, kv_heads), min(devices, kv_heads)
    return heads % devices == 0 and more % fewer == 0


def offer_sizes(draft: ArgumentDraft) -> None:
    """Say which numbers of devices `max` may mean; any where the heads are not known."""
    heads, kv_heads = _counts(draft)
    if heads and kv_heads:
        found = (size for size in range(1, heads + 1) if divides(heads, kv_heads, size))
        draft.tensor_sizes = tuple(found)


def refuse_size(draft: ArgumentDraft) -> None:
    """Note an error where vLLM would refuse to split the heads: its start takes half a minute."""
    tensor, (heads, kv_heads) = draft.values.get("tensor_parallel_size"), _counts(draft)
    if isinstance(tensor, int) and heads and kv_heads and heads % tensor:
        fitting = (str(n) for n in range(1, heads + 1) if divides(heads, kv_heads, n))
        draft.fail(
            f"tensor_parallel_size={tensor} does not divide the model's {heads} attention heads; "
            f"possible are {', '.join(fitting)}",
            draft.settings.model.details.tensor_parallel_degree,
        )


def _counts(draft: ArgumentDraft) -> tuple[int | None, int | None]:
    """The heads of a model that vLLM runs, with what `hf_overrides` changes."""
    if not draft.config or engine_for(draft.architectures, draft.values) is not None:
        return None, None
    overrides = draft.values.get("hf_overrides")
    changes = overrides if isinstance(overrides, Mapping) else {}
    return head_counts({**text_part(draft.config), **changes})
