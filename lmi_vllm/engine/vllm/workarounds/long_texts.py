"""Texts and token ids of routes that only convert them, for which vLLM has no bound.

A prompt longer than the model's context can be is refused before it is tokenized. `/tokenize` and
`/detokenize` have no such bound: 5 MB of text hold the tokenizer's one thread, and so every other
prompt, for 5 to 9 seconds, and the answer of 3 million tokens holds the event loop for 1.2 s, with
their texts 4 s (vLLM 0.33, on two cores). Which routes those are is read from what they ask of the
renderer. May go: when tests/contract/test_long_texts.py holds without it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LengthGuard:
    """Stands for the renderer's method that tokenizes one prompt, or turns ids into text."""

    convert: Callable[[Any, Any], Awaitable[Any]]
    most: int

    async def __call__(self, prompt: Any, params: Any) -> Any:
        """Return what vLLM's method returns.

        Raises:
            ValueError: the prompt is beyond our bound where the route has none; vLLM answers 400.
        """
        if params.max_total_tokens is None:
            for part in (prompt, prompt.get("encoder_prompt"), prompt.get("decoder_prompt")):
                self._check(part or {})
        return await self.convert(prompt, params)

    def _check(self, prompt: Any) -> None:
        for name, unit in (("prompt", "characters"), ("prompt_token_ids", "token ids")):
            if (length := len(prompt.get(name) or ())) > self.most:
                most = f"{self.most} {unit} (LMI_MAX_TOKENIZE_LENGTH)"
                raise ValueError(f"{name}: at most {most} (got {length})")


def guard_lengths(renderer: Any, most: int) -> None:
    """Make `renderer` refuse what is longer where vLLM has no bound."""
    renderer.tokenize_prompt_async = LengthGuard(renderer.tokenize_prompt_async, most)
