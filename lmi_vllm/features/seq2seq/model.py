"""An encoder-decoder model of Transformers: loaded, with what its files say of generating."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ForcedBOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.utils.logging import disable_progress_bar

from lmi_vllm.engine.vllm.tokenizer_trial import tried
from lmi_vllm.engine.vllm.workarounds import Scope, apply_to_the_end
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
        """Number of tokens that the model can generate: the rows of its output embedding."""
        return int(self.model.get_output_embeddings().weight.shape[0])


def load_model(arguments: EngineArguments) -> LoadedModel:
    """Load the model on the first GPU, else on the CPU.

    Raises:
        EngineStartError: the files lack something, or an argument does not fit the model.
    """
    values = arguments.values
    disable_progress_bar()  # a progress bar would be drawn between the lines of the log
    path, trust = str(values["model"]), values.get("trust_remote_code") is True
    common = {"local_files_only": True, "trust_remote_code": trust}
    dtype = _DTYPES.get(str(values.get("dtype") or "auto"))
    if dtype is None:
        raise EngineStartError(f"option.dtype={values['dtype']}: allowed are {', '.join(_DTYPES)}")
    tokenizer = _tokenizer(str(values.get("tokenizer") or path), common)
    model, found = AutoModelForSeq2SeqLM.from_pretrained(
        path, dtype=dtype, output_loading_info=True, **common
    )
    if missing := sorted(found["missing_keys"]):
        raise EngineStartError(
            f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}: "
            + ", ".join(missing[:5])
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generation = _generation_config(model, values)
    ends = generation.eos_token_id
    return LoadedModel(
        model.to(device).eval(),
        tokenizer,
        generation,
        _start_token(generation),
        tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        _length(model, tokenizer, values.get("max_model_len")),
    )


def _tokenizer(folder: str, common: Mapping[str, Any]) -> Any:
    """Return the tokenizer, tried before the weights are loaded."""
    apply_to_the_end(Scope.TOKENIZERS)
    found = tried(folder, partial(AutoTokenizer.from_pretrained, folder, **common))
    if not found.is_fast:
        raise EngineStartError(
            "the model needs a fast tokenizer (tokenizer.json) on the Transformers engine"
        )
    return found


def _start_token(generation: Any) -> int:
    start = generation.decoder_start_token_id
    start = generation.bos_token_id if start is None else start
    if not isinstance(start, int):
        raise EngineStartError(
            "neither generation_config.json nor config.json says which token answers begin with "
            "(decoder_start_token_id)"
        )
    return start


def release(model: Any) -> None:
    """Give the model's memory back, even while something still refers to the object."""
    model.to("meta")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _generation_config(model: Any, values: Mapping[str, object]) -> GenerationConfig:
    """Return the model's own, as the argument `generation_config` has it, with the overrides."""
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
    """Return the most tokens of a prompt, and of an answer.

    Raises:
        EngineStartError: `asked` is above the positions that the model has.
    """
    config = model.config
    fixed = getattr(config, "max_position_embeddings", None) if position_embeddings(model) else None
    wanted = asked if isinstance(asked, int) and asked > 0 else None
    if fixed is not None:
        if wanted is not None and wanted > fixed:
            raise EngineStartError(f"option.max_model_len={wanted} is above {fixed}, the number of "
                                   f"positions of {type(model).__name__}")  # fmt: skip
        return wanted or int(fixed)
    own = getattr(config, "n_positions", None) or tokenizer.model_max_length
    return wanted or (int(own) if own < 1 << 24 else DEFAULT_LENGTH)


def model_logits_processors(
    generation: GenerationConfig, end_tokens: Sequence[int]
) -> LogitsProcessorList:
    """Return the logits processors of generation_config, which `generate` applies to every token.

    `forced_eos_token_id` is left out: it makes the last token before the limit an end token, and
    the finish reason of a truncated answer would be `stop`.
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


def position_embeddings(model: Any) -> torch.nn.Module | None:
    """Return the decoder's learned table of absolute positions; None where it has none."""
    found: torch.nn.Module | None = getattr(model.get_decoder(), "embed_positions", None)
    return found
