"""Lengths of a model that config.json does not state, or that vLLM promises and cannot serve.

We always pass a length, -1 where none is set: the model's own, or what the KV cache fits. vLLM
takes -1 for the length itself where config.json states none (Mamba, some of BLOOM), and refuses it.

With dynamic scaling of the rotary embedding (InternLM 2 and 3) vLLM multiplies the length by the
factor, but has a table of `max_position_embeddings` rows. Later positions read beyond it.

Upstream: https://github.com/vllm-project/vllm/issues/41236 for the second; the first is not
    reported that we know of.
Releases: 0.31 and later.
Shows: the start ends with "max_model_len: Input should be greater than 0"; prompts above
    `max_position_embeddings` give numbers that are not finite.
May go: when test_plain_vllm_takes_minus_one_for_a_length and
    test_plain_vllm_promises_positions_that_it_has_no_values_for fail.
"""

import functools
from collections.abc import Callable
from math import inf
from typing import Any, Final

OF_THE_MODEL: Final = -1


def served(verify: Callable[..., int]) -> Callable[..., int]:
    """Return what stands for vLLM's `_get_and_verify_max_len`."""

    @functools.wraps(verify)
    def verified(**given: Any) -> int:
        stated, _ = given["model_arch_config"].derived_max_model_len_and_key
        if stated == inf and given["max_model_len"] == OF_THE_MODEL:
            given["max_model_len"] = None
        found = verify(**given)
        rows = _rows(given["hf_config"])
        return found if rows is None else min(found, rows)

    return verified


def _rows(config: Any) -> int | None:
    """Return the positions that the table of a dynamically scaled embedding has; else None."""
    rope = getattr(config, "rope_parameters", None)
    is_dynamic = isinstance(rope, dict) and rope.get("rope_type") == "dynamic"
    if not is_dynamic or config.model_type == "nomic_bert":  # its table has max_model_len rows
        return None
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None
