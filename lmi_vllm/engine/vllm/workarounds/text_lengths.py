"""Texts by their length: short prompts are tokenized at once, long texts are bounded everywhere.

Short prompts. vLLM tokenizes each in a thread of the renderer, which is work for two threads
(decision 98 has figures, under load only). Here they are tokenized on the event loop. vLLM keeps
one tokenizer more than threads, so the loop and a thread never share one.

Long texts and token ids. vLLM refuses a prompt that is longer than the model's context before it
tokenizes the prompt. `/tokenize` and `/detokenize` have no such bound. The renderer's calls show
which routes have none.

Upstream: https://github.com/vllm-project/vllm/pull/27407 (short prompts); the bound is not reported
    that we know of.
Releases: 0.31 and later.
Shows: 5 MB of text block the tokenizer's one thread, and so every other prompt, for 5 to 9 s. An
    answer of 3 million tokens blocks the event loop for 1.2 s, with their texts 4 s (two cores).
May go: when vLLM does the first (tests/contract/test_bridge.py), and test_long_texts.py holds.
"""

from typing import Any, Final

SHORT: Final = 1000  # characters: 1 to 2 ms, since 5 MB take 5 to 9 s


class TextLengths:
    """Replaces the renderer's method that tokenizes one prompt, or turns ids into text."""

    def __init__(self, renderer: Any, most: int) -> None:
        self._in_thread = renderer.tokenize_prompt_async
        self._here = renderer.tokenize_prompt
        self._is_fast = bool(getattr(renderer.tokenizer, "is_fast", False))
        self._most = most  # characters or ids
        self._waiting = 0  # prompts of the thread: a short one must not overtake them

    def takes(self, prompt: Any) -> bool:
        """Whether this prompt is tokenized at once: a slow tokenizer could block the loop."""
        text = prompt.get("prompt")
        if not self._is_fast or self._waiting or not isinstance(text, str):
            return False
        return len(text) <= SHORT and "encoder_prompt" not in prompt

    async def __call__(self, prompt: Any, params: Any) -> Any:
        """Return what vLLM's method returns.

        Raises:
            ValueError: the prompt is beyond our bound where the route has none; vLLM answers 400.
        """
        if params.max_total_tokens is None:
            for part in (prompt, prompt.get("encoder_prompt"), prompt.get("decoder_prompt")):
                if part:
                    self._check(part)
        if self.takes(prompt):
            return self._here(prompt, params)
        self._waiting += 1
        try:
            return await self._in_thread(prompt, params)
        finally:
            self._waiting -= 1

    def _check(self, prompt: Any) -> None:
        for name, unit in (("prompt", "characters"), ("prompt_token_ids", "token ids")):
            if (length := len(prompt.get(name) or ())) > self._most:
                most = f"{self._most} {unit} (LMI_MAX_TOKENIZE_LENGTH)"
                raise ValueError(f"{name}: at most {most} (got {length})")


def guard_lengths(renderer: Any, most: int) -> None:
    """Make `renderer` tokenize short prompts at once, and refuse texts that are too long."""
    renderer.tokenize_prompt_async = TextLengths(renderer, most)


async def render_text(renderer: Any, prompt: Any, params: Any) -> Any:
    """Return the engine's input for one prompt; a short one needs none of vLLM's tasks."""
    guard = renderer.tokenize_prompt_async
    if isinstance(guard, TextLengths) and guard.takes(prompt):
        (rendered,) = renderer.render_cmpl([prompt], params)
    else:
        (rendered,) = await renderer.render_cmpl_async([prompt], params)
    return rendered
