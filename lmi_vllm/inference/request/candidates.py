"""How many sequences a generation request makes, and how: greedy, sampled, or by beam search."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.parameters import (
    CONSTRAINTS,
    GenerationParameters,
    is_sampling,
    top_count,
)
from lmi_vllm.messages import BeamSearch

# What vLLM's beam search does not look at, with the values that mean nothing anyway.
_NOT_WITH_BEAMS: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "do_sample": (False,),
        "temperature": (0.0, 1.0),
        "top_k": (0, -1),
        "top_p": (1.0,),
        "min_p": (0.0,),
        "repetition_penalty": (1.0,),
        "presence_penalty": (0.0,),
        "frequency_penalty": (0.0,),
        "min_new_tokens": (0,),
        "stop_sequences": ([],),
        "stop": ([],),
        "stop_token_ids": ([],),
        "logit_bias": ({},),
        "bad_words": ([],),
        "allowed_token_ids": (),
        "prompt_logprobs": (),
        "decoder_input_details": (False,),
        "priority": (0,),
        "best_of": (1,),
        **dict.fromkeys(sorted(CONSTRAINTS), ()),
    }
)


@dataclass(frozen=True, slots=True)
class Candidates:
    """`generated` sequences per prompt, of which the `returned` best are answered."""

    generated: int = 1
    returned: int = 1
    beams: BeamSearch | None = None


def choose_candidates(parameters: GenerationParameters) -> Candidates:
    """Return what n, best_of and num_beams ask for (http-api.md 5).

    Raises:
        PayloadError: they contradict each other, or what else is asked for.
    """
    width = parameters.num_beams or 1
    if width > 1:
        return _beams(parameters, width)
    generated = max(parameters.best_of or 1, parameters.n or 1)
    if generated > 1 and not is_sampling(parameters):
        raise PayloadError(
            "parameters: more than one candidate (n, best_of) needs do_sample=true or a "
            "temperature above 0"
        )
    return Candidates(generated, parameters.n or generated)


def _beams(parameters: GenerationParameters, width: int) -> Candidates:
    unread = [
        name
        for name, neutral in _NOT_WITH_BEAMS.items()
        if (value := getattr(parameters, name)) is not None and value not in neutral
    ]
    if unread:
        raise PayloadError(
            f"parameters.num_beams: beam search has no use for {', '.join(unread)}; leave out "
            "either"
        )
    returned = parameters.n or width
    if returned > width:
        raise PayloadError(f"parameters.n: at most num_beams ({width}) (got {returned})")
    if (shown := top_count(parameters)) > 2 * width:
        raise PayloadError(
            f"parameters.top_n_tokens: at most twice num_beams ({2 * width}) (got {shown})"
        )
    penalty = 1.0 if parameters.length_penalty is None else parameters.length_penalty
    return Candidates(width, returned, BeamSearch(width, penalty))
