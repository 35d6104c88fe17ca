"""Requests for which the engine cannot make its parser of reasoning are refused before it.

Where an answer is bound by a grammar, vLLM's engine makes the server's reasoning parser within its
own step, to see when the grammar begins. It makes it of fields of the request, and of the
tokenizer. An exception there ends the engine with all requests.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: `/inference/v1/generate` with a grammar, on a server with the reasoning parser `k2_horizon`,
    and `reasoning_effort` "none" in `reasoning_parser_kwargs`; with `deepseek_r1` and a tokenizer
    without `<think>` a grammar alone.
May go: when integration/hostile_fields.py holds without it.
"""

from collections.abc import Mapping
from typing import Any

from lmi_vllm.engine.vllm.names import ReasoningParserManager, VLLMValidationError


def check_reasoning(llm: Any, prompt: Any, options: Mapping[str, Any]) -> None:
    """Check that the engine can find out whether a request's prompt ends in reasoning.

    Raises:
        VLLMValidationError: its fields, or the tokenizer, do not fit the server's parser.
    """
    config = llm.vllm_config.structured_outputs_config
    if not config.reasoning_parser or options.get("reasoning_ended"):
        return
    fields = options.get("reasoning_parser_kwargs") or {}
    try:  # as the engine's StructuredOutputManager does
        kind = ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)
        parser = kind(tokenizer=llm.renderer.tokenizer, **fields)
        parser.is_reasoning_end(prompt.get("prompt_token_ids") or [])
    except Exception as error:  # vLLM's own, of many kinds
        raise VLLMValidationError(f"the server's reasoning parser fails: {error}") from error
