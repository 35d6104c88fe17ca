"""Prompts as they are rendered: by their length, and by the names that they give to media.

Short prompts. vLLM tokenizes each in a thread of the renderer, which is work for two threads
(decision 98 has figures, under load only). Here they are tokenized on the event loop, by the
tokenizers library itself where nothing of Transformers or vLLM is in between that changes the ids:
that takes a third of the time. No thread changes or calls that tokenizer, since vLLM's threads have
copies.

Only so many prompts are tokenized in one turn of the event loop: the others of a list use the
thread.

Long texts and token ids. vLLM refuses a prompt that is longer than the model's context before it
tokenizes the prompt. `/tokenize` and `/detokenize` have no such bound. The renderer's calls show
which routes have none. A prompt that is to be truncated has no bound either, unless the request
names the side. Here only the part that the kept tokens can come from is tokenized.

Names of media. A message may name its file (`uuid`). vLLM keeps the file under that name alone,
where others are kept under their digest. So a client could have its picture answer for another
client's, and could ask about a picture of which it knows the name. Here a name is a client's own.

Upstream: https://github.com/vllm-project/vllm/pull/27407 (short prompts); the bound and the names
    are not reported that we know of.
Releases: 0.31 and later.
Shows: 5 MB of text block the tokenizer's one thread, and so every other prompt, for 5 to 9 s. An
    answer of 3 million tokens blocks the event loop for 1.2 s, with their texts 4 s (two cores).
    8 MB of which five tokens are kept hold other streams for 6 to 13 s, and take 1.5 GB. 5 MB in a
    chat with `enable_prompt_embeds` hold all other chats for 25 s, and take 1.4 GB.
May go: when vLLM does the first (tests/contract/test_bridge.py), the second's
    test_plain_vllm_has_no_bound_for_texts_that_are_only_converted fails, and the third's
    test_name_of_a_picture_is_the_client_s_own of integration/images_in_messages.py holds without.
"""

from contextvars import copy_context
from functools import cached_property
from typing import Any, Final

from lmi_vllm.engine.text_bounds import LEAST_CHARACTERS, kept_text
from lmi_vllm.engine.turns import TurnBudget
from lmi_vllm.engine.vllm.prompt_starts import PromptStarts
from lmi_vllm.telemetry.records import current_record

SHORT: Final = 1000  # bytes: 1 to 2 ms, since 5 MB take 5 to 9 s
MOST_IN_A_TURN: Final = 32_000  # bytes of short prompts: 60 ms
IN_ORDER: Final = (
    "an image: vLLM on a CPU reads it in one direction, this model in both; "
    'option.hf_overrides={"is_mm_prefix_lm": false} allows wrong answers'
)
# Parts of a message that hold a file, not text.
_FILES: Final = frozenset(
    {"image_url", "audio_url", "video_url", "input_audio", "image", "audio", "file"}
)
# The class of vLLM's that calls copies, and where else a tokenizer's `__call__` may be from.
_POOL: Final = "vllm.tokenizers.hf"
_PLAIN: Final = (_POOL, "transformers.tokenization_utils_")


class TextLengths:
    """Replaces the renderer's method that tokenizes one prompt, or turns ids into text."""

    def __init__(self, renderer: Any, most: int, *, single_bos: bool = False) -> None:
        self.starts = PromptStarts(renderer.tokenizer, leaves_one=single_bos)
        self._in_thread = renderer.tokenize_prompt_async
        self._here = renderer.tokenize_prompt
        self._for_engine: Any = getattr(renderer, "process_for_engine", None)
        self._tokenizer = renderer.tokenizer
        self._is_fast = bool(getattr(renderer.tokenizer, "is_fast", False))
        self._most = most  # characters or ids
        self._config = renderer.config
        # With other servers, which know the names of media, too.
        self._shares_media = self._config.ec_transfer_config is not None
        self._waiting = 0  # prompts of the thread: a short one must not overtake them
        self._turn = TurnBudget(MOST_IN_A_TURN)

    def takes(self, prompt: Any) -> bool:
        """Whether this prompt is tokenized at once: a slow tokenizer could block the loop.

        It must be then: it is counted among those of this turn of the loop.
        """
        text = prompt.get("prompt")
        if not self._is_fast or self._waiting or not isinstance(text, str):
            return False
        if len(text) > SHORT or "encoder_prompt" in prompt:
            return False
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return size <= SHORT and self._turn.takes(size)

    async def __call__(self, prompt: Any, params: Any) -> Any:
        """Return what vLLM's method returns.

        Raises:
            ValueError: it is beyond our bound, or has an image that is misread; vLLM answers 400.
        """
        prompt, params = self.starts.read(prompt, params)
        self._check_texts(prompt, params)
        prompt = self._checked_media(prompt)
        if self.takes(prompt):
            return self._here(self.tokenized(prompt, params), params)
        prompt = self._kept(prompt, params)
        self._waiting += 1
        try:
            return await self._in_thread(prompt, params)
        finally:
            self._waiting -= 1

    def in_a_thread(self, prompt: Any, params: Any) -> Any:
        """Return what vLLM's method returns in the thread of a model that pools.

        Raises:
            ValueError: it is beyond our bound; vLLM answers 400.
        """
        self._check_texts(prompt, params)
        return self._here(self._kept(prompt, params), params)

    def for_engine(self, prompt: Any, *given: Any, **more: Any) -> Any:
        """Return what vLLM's method returns in the thread of a model that pools.

        Raises:
            ValueError: it has an image that is misread; vLLM answers 400.
        """
        return self._for_engine(self._checked_media(prompt), *given, **more)

    def _checked_media(self, prompt: Any) -> Any:
        """Return a prompt with the client's own names of media."""
        if not prompt.get("multi_modal_data") and not prompt.get("multi_modal_uuids"):
            return prompt
        if prompt.get("multi_modal_data") and (
            self._config.device_config.device_type == "cpu"
            and self._config.model_config.is_mm_prefix_lm
        ):
            raise ValueError(IN_ORDER)
        return prompt if self._shares_media else with_own_names(prompt)

    def _check_texts(self, prompt: Any, params: Any) -> None:
        if params.max_total_tokens is None:
            for part in (prompt, prompt.get("encoder_prompt"), prompt.get("decoder_prompt")):
                if part:
                    self._check(part)

    @cached_property
    def _bare(self) -> Any:
        """The library's tokenizer; None where a thread may use it, or vLLM makes other ids."""
        bare, kinds = getattr(self._tokenizer, "_tokenizer", None), type(self._tokenizer).__mro__
        calling = [
            kind.__module__
            for kind in kinds
            if not vars(kind).keys().isdisjoint(("__call__", "_encode_plus"))
        ]
        is_pool = calling[:1] == [_POOL] and all(name.startswith(_PLAIN) for name in calling)
        if not is_pool or bare is None or self._tokenizer.split_special_tokens:
            return None
        return None if bare.truncation or bare.padding or bare.encode_special_tokens else bare

    def tokenized(self, prompt: Any, params: Any) -> Any:
        """Return a prompt that this takes with its ids, or as it is for vLLM to tokenize."""
        if self._bare is None or "prompt_embeds" in prompt or params.return_token_offsets:
            return prompt
        prompt = params.apply_pre_tokenization(self._tokenizer, prompt)
        special = params.add_special_tokens
        try:
            ids = self._bare.encode(prompt["prompt"], add_special_tokens=special).ids
        except TypeError:  # a lone surrogate: the error is vLLM's
            return prompt
        most = params.get_encode_kwargs().get("max_length")
        is_cut = most is not None and len(ids) > most
        return prompt if is_cut else {"prompt_token_ids": ids, **prompt}

    def _kept(self, prompt: Any, params: Any) -> Any:
        """Return a prompt with the part of its text that its tokens, if truncated, come from."""
        text, most = prompt.get("prompt"), params.truncate_prompt_tokens
        if most is None or not isinstance(text, str) or self._tokenizer is None:
            return prompt
        side = params.truncation_side or self._tokenizer.truncation_side
        if side == "left" and params.return_token_offsets:  # they count from the whole text
            return prompt
        if most < 0:  # vLLM 0.31 leaves no room for an answer, and has no name for that
            name = "max_truncation_tokens"
            most = getattr(params, name if hasattr(params, name) else "max_input_tokens")
        if most is None:  # such a text has our own bound
            return prompt
        longest = self._tokenizer.max_chars_per_token
        return {**prompt, "prompt": kept_text(text, most, longest, side)}

    def _check(self, prompt: Any) -> None:
        for name, unit in (("prompt", "characters"), ("prompt_token_ids", "token ids")):
            if (length := len(prompt.get(name) or ())) > self._most:
                most = f"{self._most} {unit} (LMI_MAX_TOKENIZE_LENGTH)"
                raise ValueError(f"{name}: at most {most} (got {length})")


def guard_lengths(renderer: Any, most: int, *, single_bos: bool = False) -> None:
    """Make `renderer` tokenize short prompts at once, and refuse texts that are too long.

    `single_bos` leaves one BOS where a text begins with it, and the tokenizer puts another one.
    """
    guard = TextLengths(renderer, most, single_bos=single_bos)
    renderer.tokenize_prompt_async = guard
    renderer.tokenize_prompt = guard.in_a_thread
    renderer.process_for_engine = guard.for_engine
    if executor := getattr(renderer, "_executor", None):  # its threads ask whose request it is
        submit = executor.submit
        executor.submit = lambda run, *given: submit(copy_context().run, run, *given)
    if apply := getattr(renderer, "_apply_chat_template_async", None):
        renderer._apply_chat_template_async = BoundedTemplate(renderer, apply)


class BoundedTemplate:
    """The renderer's call of a chat template, which refuses long texts where it tokenizes, too."""

    def __init__(self, renderer: Any, apply: Any) -> None:
        self._renderer = renderer
        self._apply = apply

    async def __call__(self, *given: Any, **arguments: Any) -> Any:
        """Return what vLLM's call returns; the last of what is `given` are the messages.

        Raises:
            ValueError: no prompt of this model has so many characters; vLLM answers 400.
        """
        if arguments.get("tokenize"):
            tokens = self._renderer.config.model_config.max_model_len
            longest = self._renderer.tokenizer.max_chars_per_token
            most = max(tokens * longest, LEAST_CHARACTERS)
            texts = {**arguments, "chat_template": None, "messages": given[-1]}
            if (length := characters(texts)) > most:
                raise ValueError(
                    f"messages: at most {most} characters, which is the upper bound for {tokens} "
                    f"tokens (max_model_len) (got {length})"
                )
        return await self._apply(*given, **arguments)


def characters(value: Any) -> int:
    """Return the characters of all texts in messages, without the files in them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = [one for name, one in value.items() if name not in _FILES]
    return sum(map(characters, value)) if isinstance(value, (list, tuple)) else 0


async def render_text(renderer: Any, prompt: Any, params: Any) -> Any:
    """Return the engine's input for one prompt; a short one needs none of vLLM's tasks."""
    guard = renderer.tokenize_prompt_async
    if isinstance(guard, TextLengths) and guard.takes(prompt):
        prompt, params = guard.starts.read(prompt, params)
        (rendered,) = renderer.render_cmpl([guard.tokenized(prompt, params)], params)
    else:
        (rendered,) = await renderer.render_cmpl_async([prompt], params)
    return rendered


def with_own_names(prompt: Any) -> Any:
    """Return a prompt whose names of media are names of this client; an unnamed one has None."""
    given = prompt.get("multi_modal_uuids")
    if not given:
        return prompt
    record = current_record()
    source = "" if record is None else record.source
    return {**prompt, "multi_modal_uuids": {kind: _own(given[kind], source) for kind in given}}


def _own(names: Any, source: str) -> Any:
    if isinstance(names, str):
        return f"{source}|{names}"
    return None if names is None else [_own(name, source) for name in names]
