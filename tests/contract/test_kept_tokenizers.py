"""What vLLM keeps of the tokenizers of engines that have ended."""

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.workarounds.kept_tokenizers import forget_tokenizers

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    """Each test begins and ends with an empty cache."""
    forget_tokenizers()
    yield
    forget_tokenizers()


def kept_by(chats: int) -> int:
    """Return how many tokenizers stay of so many engines that have read one chat each."""
    from vllm.tokenizers.hf import maybe_make_thread_pool  # noqa: PLC0415
    from vllm.tokenizers.registry import get_tokenizer  # noqa: PLC0415
    from vllm.utils.func_utils import supports_kw  # noqa: PLC0415

    tokenizer: Any = get_tokenizer(str(DEMO_MODEL_DIR))
    before = alive()
    for _ in range(chats):
        pooled = copy.copy(tokenizer)  # as vLLM's renderer does
        maybe_make_thread_pool(pooled, 2)
        supports_kw(pooled.apply_chat_template, "tools")
        del pooled
    return alive() - before


def alive() -> int:
    """Return the number of tokenizers in this process."""
    from transformers import TokenizersBackend  # noqa: PLC0415

    gc.collect()
    return sum(issubclass(type(each), TokenizersBackend) for each in gc.get_objects())


def test_plain_vllm_keeps_tokenizers_that_no_engine_has() -> None:
    """Five for each engine: the one that is copied, and those that its threads borrow."""
    assert kept_by(chats=3) == 15


def test_ended_engine_leaves_no_tokenizer() -> None:
    """What `close` calls lets go of them."""
    before = alive()
    assert kept_by(chats=3) > 0
    forget_tokenizers()
    assert alive() == before
