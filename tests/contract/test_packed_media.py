"""Media as packed tensors: what vLLM makes of a text that holds something else."""

import pytest

pytestmark = pytest.mark.vllm


def test_plain_vllm_unpacks_media_to_anything() -> None:
    """`request_bodies`: its handler takes what comes out for an item, and fails."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (  # noqa: PLC0415 (slow)
        decode_mm_kwargs_item,
    )

    with pytest.raises(AttributeError, match="items"):
        decode_mm_kwargs_item("AAAA")
