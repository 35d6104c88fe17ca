"""Validated parameters to vLLM's sampling fields, constraints and candidates."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.parameters import GenerationParameters
from lmi_vllm.messages import BeamSearch, ServingProfile, TgiRoute

DEFAULT_MAX_NEW_TOKENS: Final = 30
_SEED_BITS: Final = 53  # JavaScript's clients read larger ones inexactly
CONSTRAINTS: Final = frozenset(
    {
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "grammar",
        "response_format",
    }
)
# Ours -> vLLM's SamplingParams; only given parameters are passed.
_RENAMED: Final = MappingProxyType(
    {"min_new_tokens": "min_tokens", "ignore_eos_token": "ignore_eos"}
)
_SAME_MEANING: Final = frozenset(
    {
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "seed", "stop_token_ids", "include_stop_str_in_output",
        "skip_special_tokens", "spaces_between_special_tokens", "bad_words", "allowed_token_ids",
        "prompt_logprobs", *_RENAMED,
    }
)  # fmt: skip
# Parameters that vLLM's beam search ignores, with their neutral values.
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
    """Return what n, best_of and num_beams ask for.

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


def as_in_tgi(parameters: GenerationParameters) -> GenerationParameters:
    """Return the parameters as TGI reads them: a sampling value is stronger than `do_sample` false.

    TGI's clients send false where sampling is not asked for.
    """
    if parameters.do_sample is not False or parameters.temperature == 0:
        return parameters
    is_shaped = (
        parameters.temperature not in (None, 1.0)
        or parameters.top_k not in (None, 0)
        or parameters.top_p not in (None, 1.0)
    )
    return parameters.model_copy(update={"do_sample": True}) if is_shaped else parameters


def with_seed(parameters: GenerationParameters) -> GenerationParameters:
    """Return the parameters of TGI's client with the seed that its details show.

    TGI draws one for every sampled answer. vLLM samples seeded requests one by one, so only those
    that ask for details get it.
    """
    asks = parameters.details or parameters.decoder_input_details
    if not asks or parameters.seed is not None or not is_sampling(parameters):
        return parameters
    return parameters.model_copy(update={"seed": secrets.randbits(_SEED_BITS)})


def is_sampling(parameters: GenerationParameters) -> bool:
    """Whether to sample: asked for, or implied by a sampling value; else greedy as documented."""
    if parameters.do_sample is not None:
        return parameters.do_sample and parameters.temperature != 0
    if parameters.temperature == 0:
        return False
    hints = (parameters.temperature, parameters.top_p, parameters.top_k, parameters.min_p)
    return hints.count(None) < len(hints)


def top_count(parameters: GenerationParameters) -> int:
    """Return how many of the most probable tokens are wanted at each position."""
    wanted = parameters.logprobs
    is_count = wanted is not None and not isinstance(wanted, bool)
    return parameters.top_n_tokens or (wanted if is_count else 0) or 0


def request_sampling(
    parameters: GenerationParameters,
    profile: ServingProfile,
    candidates: Candidates,
    wants_logprobs: bool,
    tgi_route: TgiRoute | None,
) -> dict[str, Any]:
    """Return the SamplingParams fields of a request: its parameters, and those its answer needs."""
    fields = sampling_fields(parameters, None) if tgi_route else sampling_fields(parameters)
    if profile.tgi_compat:  # TGI keeps a stop sequence in the text
        fields.setdefault("include_stop_str_in_output", True)
    is_several = candidates.generated > 1
    if is_several:
        fields["n"] = candidates.generated
    count = top_count(parameters)
    if count or wants_logprobs or is_several:  # candidates are ranked by their probability
        fields["logprobs"] = count
    if parameters.decoder_input_details and wants_details(parameters, profile, tgi_route):
        fields["prompt_logprobs"] = 1
    return fields


def wants_details(
    parameters: GenerationParameters, profile: ServingProfile, tgi_route: TgiRoute | None
) -> bool:
    """Whether the answer has `details`; TGI's clients get them unless they decline."""
    if tgi_route:  # TGI 3: either of the two asks for details
        return bool(parameters.details or parameters.decoder_input_details)
    return bool(profile.tgi_compat if parameters.details is None else parameters.details)


def sampling_fields(
    parameters: GenerationParameters, default_max_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
) -> dict[str, Any]:
    """Return the vLLM SamplingParams fields for the parameters.

    `default_max_tokens` None means up to the end of the context.
    """
    given = parameters.given()
    fields: dict[str, Any] = {}
    for name in given.keys() & _SAME_MEANING:
        fields[_RENAMED.get(name, name)] = given[name]
    if not is_sampling(parameters):
        fields["temperature"] = 0.0
    if fields.get("top_k") == -1:
        fields["top_k"] = 0  # both mean off
    wanted = parameters.max_new_tokens or parameters.max_tokens or default_max_tokens
    if wanted is not None and (least := parameters.min_new_tokens or 0) > wanted:
        raise PayloadError(
            f"parameters.min_new_tokens: {least} is more than max_new_tokens ({wanted})"
        )
    fields["max_tokens"] = wanted
    if stop := _stop_strings(parameters):
        fields["stop"] = stop
    if parameters.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(parameters.logit_bias)
    if (constraint := structured_outputs(given)) is not None:
        fields["structured_outputs"] = constraint
    return fields


def _stop_strings(parameters: GenerationParameters) -> list[str]:
    for name in ("stop_sequences", "stop"):
        if "" in (getattr(parameters, name) or ()):
            raise PayloadError(f"parameters.{name}: an empty stop string is not allowed")
    return list(dict.fromkeys([*(parameters.stop_sequences or ()), *(parameters.stop or ())]))


def _logit_bias(raw: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in raw.items()}
    except ValueError:
        raise PayloadError("parameters.logit_bias: keys must be token ids") from None


def structured_outputs(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return vLLM's structured-output constraint, from any of the request's spellings.

    Raises:
        PayloadError: more than one is used, or one is not of its form.
    """
    if CONSTRAINTS.isdisjoint(given):
        return None
    older = {
        "json": given.get("guided_json"),
        "regex": given.get("guided_regex"),
        "choice": given.get("guided_choice"),
        "grammar": given.get("guided_grammar"),
    }
    found: list[dict[str, Any]] = [
        {kind: value} for kind, value in older.items() if value is not None
    ]
    if given.get("structured_outputs") is not None:
        found.append(given["structured_outputs"])
    if given.get("grammar") is not None:
        found.append(_tgi_grammar(given["grammar"], "grammar"))
    if given.get("response_format") is not None:
        found += _response_format(given["response_format"])
    if len(found) > 1:
        raise PayloadError(
            "parameters: only one of structured_outputs, response_format, grammar and guided_* "
            "may be given"
        )
    return found[0] if found else None


def _tgi_grammar(grammar: Mapping[str, Any], name: str) -> dict[str, Any]:
    kind, value = grammar.get("type"), grammar.get("value")
    if kind not in ("json", "json_object", "regex", "json_schema") or value is None:
        raise PayloadError(
            f'parameters.{name}: expected {{"type": "json" or "regex", "value": ...}}'
        )
    if kind == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]  # TGI 3: {"name": ..., "schema": {...}}
    return {"regex" if kind == "regex" else "json": value}


def _response_format(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = wanted.get("type")
    if wanted.get("value") is not None:
        if wanted.get("json_schema") is not None:
            raise PayloadError(
                "parameters.response_format: only one of value and json_schema may be given"
            )
        return [_tgi_grammar(wanted, "response_format")]
    if kind == "text":
        return []
    if kind == "json_object":
        return [{"json_object": True}]
    schema = wanted.get("json_schema")
    if kind == "json_schema" and isinstance(schema, dict) and "schema" in schema:
        return [{"json": schema["schema"]}]
    raise PayloadError(
        "parameters.response_format: type must be text, json_object or json_schema (with "
        "json_schema.schema), or json, json_object or regex with value"
    )
