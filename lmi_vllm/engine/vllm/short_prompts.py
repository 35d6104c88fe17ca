"""Short prompts are tokenized on the event loop instead of on the renderer's thread.

Handing one to the thread and taking its tokens back is work for two threads: decision 98 has what
was measured, under load only. vLLM keeps one tokenizer more than threads, so that the loop and a
thread never share one. May go: when vLLM does it, or no longer has the methods
(tests/contract/test_bridge.py).
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

SHORT: Final = 1000  # characters: 1 to 2 ms, by the 5 to 9 s that 5 MB took (long_texts)


class ShortPrompts:
    """Stands for the renderer's method that hands one prompt to its thread."""

    def __init__(
        self,
        tokenize: Callable[[Any, Any], Any],
        in_thread: Callable[[Any, Any], Awaitable[Any]],
    ) -> None:
        self._tokenize = tokenize
        self._in_thread = in_thread
        self._waiting = 0  # prompts that are the thread's: a short one does not pass them

    async def __call__(self, prompt: Any, params: Any) -> Any:
        """Return what the renderer's method returns."""
        if not self._waiting and len(prompt["prompt"]) <= SHORT:
            return self._tokenize(prompt, params)
        self._waiting += 1
        try:
            return await self._in_thread(prompt, params)
        finally:
            self._waiting -= 1


def tokenize_short_prompts_here(renderer: Any) -> None:
    """Make `renderer` do so, where its tokenizer is a fast one and the release has the methods."""
    tokenize = getattr(renderer, "_tokenize_prompt", None)
    in_thread = getattr(renderer, "_tokenize_prompt_async", None)
    if tokenize and in_thread and getattr(renderer.tokenizer, "is_fast", False):
        renderer._tokenize_prompt_async = ShortPrompts(tokenize, in_thread)
