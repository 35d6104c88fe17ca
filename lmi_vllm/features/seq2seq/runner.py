"""Requests of encoder-decoder models as tokens: prompts are encoded, checked and run as steps."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from weakref import WeakValueDictionary

from lmi_vllm.engine.text_bounds import kept_text
from lmi_vllm.errors import LmiError, PayloadError
from lmi_vllm.features.seq2seq.batch import Item, StepRequest
from lmi_vllm.features.seq2seq.model import LoadedModel
from lmi_vllm.features.seq2seq.sampling import Sampling, SamplingBounds, read_sampling
from lmi_vllm.features.seq2seq.steps import StepThread
from lmi_vllm.features.seq2seq.text import TokenTexts
from lmi_vllm.messages import EngineArguments, GenerationChunk, PromptToken, ServingProfile
from lmi_vllm.telemetry.records import current_record

DEFAULT_ROWS: Final = 256
# Fields of generation_config that a request may go without; the penalty always applies, as on vLLM.
_SAMPLING_DEFAULTS: Final = ("temperature", "top_k", "top_p", "min_p")
_MODEL_DEFAULTS: Final = (*_SAMPLING_DEFAULTS, "repetition_penalty")


class SequenceRunner:
    """Runs prompts on one model; the tokenizer, which is not safe for two threads, has its own."""

    def __init__(
        self, loaded: LoadedModel, arguments: EngineArguments, profile: ServingProfile
    ) -> None:
        self.max_model_len = loaded.max_model_len
        self.tokenizer = loaded.tokenizer
        self.defaults = _model_defaults(loaded)
        self.texts = TokenTexts(loaded.tokenizer)
        self._longest_token = max(map(len, loaded.tokenizer.get_vocab()))  # characters
        self._tokenizer_thread = ThreadPoolExecutor(1, "tokenizer")
        self._turns = WeakValueDictionary[object, asyncio.Lock]()
        self._bounds = SamplingBounds(
            loaded.max_model_len, loaded.vocabulary, profile.limits.max_logprobs
        )
        seed = arguments.values.get("seed")
        self.steps = StepThread(
            loaded,
            self.texts,
            arguments.number("max_num_seqs", DEFAULT_ROWS),
            seed if isinstance(seed, int) else None,
        )

    def sampling(self, given: Mapping[str, Any], *, uses_defaults: bool) -> Sampling:
        """Return the sampling parameters of a request over the model's defaults.

        With `uses_defaults` temperature, top_k, top_p and min_p of generation_config count too.

        Raises:
            PayloadError: a field is out of range, or this engine does not have it.
        """
        own = {
            name: value
            for name, value in self.defaults.items()
            if uses_defaults or name not in _SAMPLING_DEFAULTS
        }
        return read_sampling({**own, **given}, self._bounds)

    async def encode(
        self, text: str, *, truncate: int | None = None, side: str = "left", special: bool = True
    ) -> Sequence[int]:
        """Return the token ids of a prompt; with `truncate` at most that many, cut at `side`.

        A text that cannot fit is refused before it is tokenized: others wait for the tokenizer.

        Raises:
            PayloadError: it is longer than the encoder takes, or has no token.
        """
        if truncate is not None:
            text = kept_text(text, truncate, self._longest_token, side)
        elif len(text) > (most := self.max_model_len * self._longest_token):
            raise PayloadError(
                f"the prompt has {len(text)} characters, more than the {most} that "
                f"{self.max_model_len} tokens (max_model_len) can have"
            )

        def tokens() -> list[int]:
            options: dict[str, Any] = {}
            if truncate is not None:
                self.tokenizer.truncation_side = side
                options = {"truncation": True, "max_length": truncate}
            encoding = self.tokenizer(text, add_special_tokens=special, verbose=False, **options)
            ids: list[int] = encoding["input_ids"]
            return ids

        return self.checked_prompt(await self.with_tokenizer(tokens))

    def checked_prompt(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the token ids of a prompt unchanged, once they are known to fit the model.

        Raises:
            PayloadError: there are too many, none, or one that the model does not know.
        """
        if len(ids) > self.max_model_len:
            raise PayloadError(
                f"the prompt has {len(ids)} tokens, and the encoder takes at most "
                f"{self.max_model_len} (max_model_len)"
            )
        if not ids:
            raise PayloadError("the prompt has no token")
        if max(ids) >= self._bounds.vocabulary:
            raise PayloadError(f"the prompt has a token id above {self._bounds.vocabulary - 1}")
        return ids

    async def with_tokenizer(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, run while no other call uses the tokenizer.

        Each request waits with one call at a time: a list of prompts lets others in between.
        """
        turn = self._turns.setdefault(_owner(), asyncio.Lock())
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._tokenizer_thread, call)

    async def run(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, is_streaming: bool
    ) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """Yield the chunks of all prompts as they come, each with its prompt's index.

        Closing the iterator aborts what still runs.

        Raises:
            EngineDeadError: the engine is gone; also while iterating.
        """
        arrived: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        bad_words = await self.with_tokenizer(lambda: self._bad_words(sampling.bad_words))
        owner = _owner()
        requests = [
            StepRequest(ids, sampling, bad_words, is_streaming, _numbered(arrived, number), owner)
            for number, ids in enumerate(prompts)
        ]
        if (record := current_record()) is not None:
            record.sequences += requests
        left = sampling.n * len(requests)
        try:
            for request in requests:
                self.steps.submit(request)
            while left:
                number, item = await arrived.get()
                if isinstance(item, LmiError):
                    raise item
                left -= item.finish_reason is not None
                yield number, item
        finally:
            for request in requests:
                self.steps.abort(request)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[PromptToken]:
        """Return the tokens of `text`, each with its start and end in characters."""

        def encoded() -> Any:
            return self.tokenizer(
                text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
            )

        encoding = await self.with_tokenizer(encoded)
        pairs = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        return [PromptToken(token, *span) for token, span in pairs]

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return each word's tokens, at the beginning of a text and inside one (as vLLM does).

        Raises:
            PayloadError: a word cannot be encoded.
        """
        if any("\ud800" <= letter <= "\udfff" for letter in "".join(words)):
            raise PayloadError("bad_words: half of a surrogate pair is no text")
        texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        encoded = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        known = self._bounds.vocabulary
        return [ids for ids in encoded if ids and max(ids) < known]


def _owner() -> object:
    """Return what stands for the client's request: its record's identity, as records compare."""
    record = current_record()
    return object() if record is None else id(record)


def _numbered(queue: "asyncio.Queue[tuple[int, Item]]", number: int) -> Callable[[Item], None]:
    return lambda item: queue.put_nowait((number, item))


def _model_defaults(loaded: LoadedModel) -> Mapping[str, Any]:
    """Return the sampling fields of generation_config that differ from Transformers' defaults."""
    said = loaded.generation.to_diff_dict()
    return {name: said[name] for name in _MODEL_DEFAULTS if said.get(name) is not None}
