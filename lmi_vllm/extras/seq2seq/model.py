"""Encoder-decoder models of Transformers: loading one, and decoding a batch that changes.

Rows of the batch have different lengths. The self-attention caches are padded on the *left*, so
that every row's newest token is at the same place, and masked there. T5's position bias depends
on the distance of two tokens alone, so padding before both changes nothing. BART and its like add
a learned vector for each absolute position: there each row is told its own position (`_Positions`).
The encoder's side is padded on the right and masked. A row is computed alone until its first token
is known and then joins; so nothing that Transformers' `generate` would not compute enters a row.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import pad
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    ForcedBOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.logging import disable_progress_bar

from lmi_vllm.errors import EngineStartError
from lmi_vllm.messages import EngineArguments

logger = logging.getLogger(__name__)

DEFAULT_LENGTH: Final = 512  # what T5 was trained with; its configurations seldom say
_DTYPES: Final = {
    "auto": "auto", "half": torch.float16, "float16": torch.float16,
    "bfloat16": torch.bfloat16, "float": torch.float32, "float32": torch.float32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer and what its files say of generating."""

    model: Any
    tokenizer: Any
    generation: GenerationConfig
    start_token: int
    end_tokens: tuple[int, ...]
    max_model_len: int

    @property
    def vocabulary(self) -> int:
        """Tokens the model can answer with."""
        return int(self.model.get_output_embeddings().weight.shape[0])


def load_model(arguments: EngineArguments) -> LoadedModel:
    """Load the model on the first GPU, else on the CPU.

    Raises:
        EngineStartError: the files lack something, or an argument does not fit the model.
    """
    values = arguments.values
    disable_progress_bar()  # its bars would go between the lines of the log
    path, trust = str(values["model"]), values.get("trust_remote_code") is True
    common = {"local_files_only": True, "trust_remote_code": trust}
    dtype = _DTYPES.get(str(values.get("dtype") or "auto"))
    if dtype is None:
        raise EngineStartError(f"dtype {values['dtype']}: possible are {', '.join(_DTYPES)}")
    model, found = AutoModelForSeq2SeqLM.from_pretrained(
        path, dtype=dtype, output_loading_info=True, **common
    )
    if missing := sorted(found["missing_keys"]):
        raise EngineStartError(
            f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}: "
            + ", ".join(missing[:5])
        )
    tokenizer = AutoTokenizer.from_pretrained(str(values.get("tokenizer") or path), **common)
    if not tokenizer.is_fast:
        raise EngineStartError("the Transformers engine needs a fast tokenizer (tokenizer.json)")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generation = _generation_config(model, values)
    start = generation.decoder_start_token_id
    start = generation.bos_token_id if start is None else start
    if not isinstance(start, int):
        raise EngineStartError("neither generation_config.json nor config.json says which token "
                               "answers begin with (decoder_start_token_id)")  # fmt: skip
    ends = generation.eos_token_id
    return LoadedModel(
        model.to(device).eval(),
        tokenizer,
        generation,
        start,
        tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        _length(model, tokenizer, values.get("max_model_len")),
    )


def release(model: Any) -> None:
    """Give the model's memory back, even while something still refers to the object."""
    model.to("meta")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _generation_config(model: Any, values: Mapping[str, object]) -> GenerationConfig:
    """The model's own, as the engine argument `generation_config` has it, with the overrides."""
    found: GenerationConfig = model.generation_config
    if values.get("generation_config") == "vllm":
        keep = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
        found = GenerationConfig(**{name: getattr(found, name) for name in keep})
    overrides = values.get("override_generation_config")
    if isinstance(overrides, Mapping):
        found.update(**overrides)
    if (found.num_beams or 1) > 1:
        logger.warning(
            "the model's generation_config asks for a beam search of %d: this engine has none, "
            "answers are greedy or sampled",
            found.num_beams,
        )
    return found


def _length(model: Any, tokenizer: Any, asked: object) -> int:
    """The longest prompt, and the longest answer."""
    config = model.config
    fixed = getattr(config, "max_position_embeddings", None) if _embeddings(model) else None
    wanted = asked if isinstance(asked, int) and asked > 0 else None
    if fixed is not None:
        if wanted is not None and wanted > fixed:
            raise EngineStartError(f"max_model_len={wanted} is above {fixed}, the positions that "
                                   f"{type(model).__name__} has")  # fmt: skip
        return wanted or int(fixed)
    own = getattr(config, "n_positions", None) or tokenizer.model_max_length
    return wanted or (int(own) if own < 1 << 24 else DEFAULT_LENGTH)


def model_rules(generation: GenerationConfig, end_tokens: Sequence[int]) -> LogitsProcessorList:
    """What the model's own generation_config always asks for, sampled or not, as `generate` does.

    `forced_eos_token_id` is left out: it makes the last token before the limit an end token, which
    would say `stop` of an answer that was cut.
    """
    rules = LogitsProcessorList()
    if generation.no_repeat_ngram_size:
        rules.append(NoRepeatNGramLogitsProcessor(generation.no_repeat_ngram_size))
    if generation.bad_words_ids:
        rules.append(NoBadWordsLogitsProcessor(generation.bad_words_ids, list(end_tokens) or None))
    if generation.min_length and end_tokens:
        rules.append(MinLengthLogitsProcessor(generation.min_length, list(end_tokens)))
    if generation.forced_bos_token_id is not None:
        rules.append(ForcedBOSTokenLogitsProcessor(generation.forced_bos_token_id))
    if generation.suppress_tokens:
        rules.append(SuppressTokensLogitsProcessor(generation.suppress_tokens))
    return rules


def _embeddings(model: Any) -> torch.nn.Module | None:
    """The decoder's table of absolute positions; None where it has none."""
    found: torch.nn.Module | None = getattr(model.get_decoder(), "embed_positions", None)
    return found


class _Positions:
    """Gives each row of a decoding step the vector of its own position."""

    def __init__(self, embeddings: torch.nn.Module) -> None:
        self.rows: torch.Tensor | None = None  # None: as the model counts, for one row alone
        embeddings.register_forward_pre_hook(self._before, with_kwargs=True)
        embeddings.register_forward_hook(self._after)

    def _before(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return None if self.rows is None else (args, {**kwargs, "position_ids": self.rows})

    def _after(self, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self.rows is None:
            return None
        return output.reshape(len(self.rows), 1, output.shape[-1])


class DecodingBatch:
    """The rows that are being decoded together."""

    def __init__(self, model: Any, start_token: int) -> None:
        self._model = model
        self._device = model.device
        self._start = start_token
        embeddings = _embeddings(model)
        self._positions = None if embeddings is None else _Positions(embeddings)
        self._lengths: list[int] = []  # of each row's self-attention cache
        self._memory_lengths: list[int] = []
        self._memory = torch.empty(0)  # the encoder's answer, [row, token, feature]
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def __len__(self) -> int:
        return len(self._lengths)

    def encode(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return what the decoder is to look at for one prompt."""
        ids = torch.tensor([list(prompt)], device=self._device)
        output = self._model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids))
        memory: torch.Tensor = output.last_hidden_state
        return memory

    def join(self, memory: torch.Tensor) -> torch.Tensor:
        """Add a row at the end; returns the logits of its first token."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        mask = torch.ones(memory.shape[:2], dtype=torch.long, device=self._device)
        logits = self._forward(cache, memory, mask, [self._start], mask[:, :1])
        if not self._lengths:
            self._cache, self._memory = cache, memory
        else:
            self._append(cache, memory)
        self._lengths.append(1)
        self._memory_lengths.append(memory.shape[1])
        return logits[0]

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Give each row its newest token; returns the logits of the next ones."""
        lengths = torch.tensor(self._lengths, device=self._device)
        if self._positions is not None:
            self._positions.rows = lengths
        longest = max(self._lengths) + 1
        places = torch.arange(longest, device=self._device)
        mask = (places >= (longest - 1 - lengths)[:, None]).long()
        memory_places = torch.arange(self._memory.shape[1], device=self._device)
        memory_lengths = torch.tensor(self._memory_lengths, device=self._device)
        memory_mask = (memory_places < memory_lengths[:, None]).long()
        try:
            logits = self._forward(self._cache, self._memory, memory_mask, tokens, mask)
        finally:
            if self._positions is not None:
                self._positions.rows = None
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Let all other rows go, and the padding that only they needed."""
        if len(rows) == len(self._lengths):
            return
        self._lengths = [self._lengths[row] for row in rows]
        self._memory_lengths = [self._memory_lengths[row] for row in rows]
        if not rows:
            self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            self._memory = torch.empty(0)
            return
        index = torch.tensor(list(rows), device=self._device)
        own, across = max(self._lengths), max(self._memory_lengths)
        for layer in self._cache.self_attention_cache.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]
            layer.keys, layer.values = layer.keys[:, :, -own:], layer.values[:, :, -own:]
        for layer in self._cache.cross_attention_cache.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]
            layer.keys, layer.values = layer.keys[:, :, :across], layer.values[:, :, :across]
        self._memory = self._memory[index][:, :across]

    def _append(self, cache: EncoderDecoderCache, memory: torch.Tensor) -> None:
        longest, across = max(self._lengths), max(self._memory.shape[1], memory.shape[1])
        own = zip(
            self._cache.self_attention_cache.layers, cache.self_attention_cache.layers, strict=True
        )
        for ours, new in own:
            left = (0, 0, longest - 1, 0)
            ours.keys = torch.cat([ours.keys, pad(new.keys, left)])
            ours.values = torch.cat([ours.values, pad(new.values, left)])
        cross = zip(
            self._cache.cross_attention_cache.layers,
            cache.cross_attention_cache.layers,
            strict=True,
        )
        for ours, new in cross:
            ours.keys = _stacked(ours.keys, new.keys, across)
            ours.values = _stacked(ours.values, new.values, across)
        self._memory = _stacked(self._memory[:, None], memory[:, None], across)[:, 0]

    def _forward(
        self,
        cache: EncoderDecoderCache,
        memory: torch.Tensor,
        memory_mask: torch.Tensor,
        tokens: Sequence[int],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        output = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=memory),
            attention_mask=memory_mask,
            decoder_input_ids=torch.tensor([[token] for token in tokens], device=self._device),
            decoder_attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1].float().cpu()
        return logits


def _stacked(ours: torch.Tensor, new: torch.Tensor, length: int) -> torch.Tensor:
    """Stack two tensors of [row, head, token, feature], both padded on the right."""
    return torch.cat([pad(one, (0, 0, 0, length - one.shape[2])) for one in (ours, new)])
