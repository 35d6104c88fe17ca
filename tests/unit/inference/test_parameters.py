from typing import Any

import pytest

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.parameters import (
    GenerationParameters,
    UnreadNames,
    parse_parameters,
    unread_names,
)
from lmi_vllm.inference.request.sampling import (
    choose_candidates,
    is_sampling,
    sampling_fields,
)

GREEDY = {"temperature": 0.0, "max_tokens": 30}
SCHEMA = {"type": "object"}


def fields(**given: Any) -> dict[str, Any]:
    """Return the sampling fields of a request with these parameters."""
    return sampling_fields(parse_parameters(given))


# Parameters -> what they add to the greedy default (docs/parameters.md).
MAPPING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "max_new_tokens": ({"max_new_tokens": 5}, {"max_tokens": 5}),
    "max_tokens alias": ({"max_tokens": 5}, {"max_tokens": 5}),
    "max_new_tokens wins": ({"max_tokens": 5, "max_new_tokens": 6}, {"max_tokens": 6}),
    "max_new_tokens null": ({"max_new_tokens": None}, {}),
    "whole number written as float": ({"max_new_tokens": 5.0}, {"max_tokens": 5}),
    "min_new_tokens": ({"min_new_tokens": 2}, {"min_tokens": 2}),
    "min_tokens alias": ({"min_tokens": 2}, {"min_tokens": 2}),
    "min_tokens beside null": ({"min_new_tokens": None, "min_tokens": 2}, {"min_tokens": 2}),
    "min_new_tokens wins": ({"min_new_tokens": 1, "min_tokens": 2}, {"min_tokens": 1}),
    "repetition_penalty": ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    "presence_penalty": ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    "frequency_penalty": ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    "length_penalty": ({"length_penalty": 0.5}, {}),
    "seed": ({"seed": 7}, {"seed": 7}),
    "seed as text": ({"seed": "7"}, {"seed": 7}),
    "seed negative": ({"seed": -1}, {"seed": -1}),
    "seed largest": ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    "stop_sequences": ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
    "stop_sequences text": ({"stop_sequences": "a"}, {"stop": ["a"]}),
    "stop": ({"stop": "a"}, {"stop": ["a"]}),
    "both stops": ({"stop_sequences": ["a", "b"], "stop": ["b", "c"]}, {"stop": ["a", "b", "c"]}),
    "no stops": ({"stop": []}, {}),
    "stop_token_ids": ({"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2]}),
    "include_stop_str_in_output": (
        {"include_stop_str_in_output": True},
        {"include_stop_str_in_output": True},
    ),
    "skip_special_tokens": ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    "spaces_between_special_tokens": (
        {"spaces_between_special_tokens": False},
        {"spaces_between_special_tokens": False},
    ),
    "ignore_eos_token": ({"ignore_eos_token": True}, {"ignore_eos": True}),
    "ignore_eos alias": ({"ignore_eos": True}, {"ignore_eos": True}),
    "ignore_eos beside null": (
        {"ignore_eos_token": None, "ignore_eos": True},
        {"ignore_eos": True},
    ),
    "ignore_eos_token wins": (
        {"ignore_eos_token": False, "ignore_eos": True},
        {"ignore_eos": False},
    ),
    "prompt_logprobs": ({"prompt_logprobs": 3}, {"prompt_logprobs": 3}),
    "logit_bias": ({"logit_bias": {"5": 1}}, {"logit_bias": {5: 1.0}}),
    "bad_words": ({"bad_words": ["a"]}, {"bad_words": ["a"]}),
    "allowed_token_ids": ({"allowed_token_ids": [1]}, {"allowed_token_ids": [1]}),
    "guided_json": ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    "guided_json text": ({"guided_json": "{}"}, {"structured_outputs": {"json": "{}"}}),
    "guided_regex": ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    "guided_choice": ({"guided_choice": ["a"]}, {"structured_outputs": {"choice": ["a"]}}),
    "guided_grammar": ({"guided_grammar": "g"}, {"structured_outputs": {"grammar": "g"}}),
    "structured_outputs": (
        {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"regex": "a"}},
    ),
    "grammar json": (
        {"grammar": {"type": "json", "value": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
    ),
    "grammar regex": (
        {"grammar": {"type": "regex", "value": "a+"}},
        {"structured_outputs": {"regex": "a+"}},
    ),
    "grammar json_schema as TGI 3": (
        {"grammar": {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
    ),
    "response_format text": ({"response_format": {"type": "text"}}, {}),
    "response_format object": (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ),
    "response_format schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
    ),
    "response_format object as TGI": (
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
    ),
    "response_format regex as TGI": (
        {"response_format": {"type": "regex", "value": "a+"}},
        {"structured_outputs": {"regex": "a+"}},
    ),
    "TGI's without effect": (
        {"typical_p": 0.5, "watermark": True, "early_stopping": True, "cached_prompt": "x"},
        {},
    ),
    "ours, not the engine's": (
        {"details": True, "return_full_text": True, "truncate": 5, "adapters": "a"},
        {},
    ),
    "unknown": ({"nonsense": 1}, {}),
    "numbers as text": (
        {
            "max_new_tokens": "3", "min_new_tokens": " 2 ", "temperature": "0.5", "top_k": "7.0",
            "top_p": "1e-1", "stop_token_ids": ["1"], "logit_bias": {"5": "-1.5"},
        },
        {
            "max_tokens": 3, "min_tokens": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.1,
            "stop_token_ids": [1], "logit_bias": {5: -1.5},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "added"), MAPPING.values(), ids=MAPPING)
def test_parameters_map_to_sampling_fields(given: dict[str, Any], added: dict[str, Any]) -> None:
    """Each parameter becomes vLLM's field of that meaning; greedy unless sampling is asked for."""
    assert fields(**given) == GREEDY | added


# Parameters -> whether to sample, and the temperature that goes to the engine (None: not set).
SAMPLING: dict[str, tuple[dict[str, Any], bool, float | None]] = {
    "nothing given": ({}, False, 0.0),
    "do_sample false": ({"do_sample": False}, False, 0.0),
    "do_sample false beats temperature": ({"do_sample": False, "temperature": 0.7}, False, 0.0),
    "do_sample true": ({"do_sample": True}, True, None),
    "do_sample true, temperature 0": ({"do_sample": True, "temperature": 0}, False, 0.0),
    "do_sample null": ({"do_sample": None}, False, 0.0),
    "temperature": ({"temperature": 0.7}, True, 0.7),
    "temperature 0": ({"temperature": 0}, False, 0.0),
    "temperature 0 beats top_p": ({"temperature": 0, "top_p": 0.5}, False, 0.0),
    "top_p": ({"top_p": 0.5}, True, None),
    "top_k": ({"top_k": 5}, True, None),
    "top_k 0": ({"top_k": 0}, True, None),
    "min_p": ({"min_p": 0.1}, True, None),
    "a penalty alone": ({"repetition_penalty": 1.2}, False, 0.0),
    "a seed alone": ({"seed": 1}, False, 0.0),
}


@pytest.mark.parametrize(("given", "samples", "temperature"), SAMPLING.values(), ids=SAMPLING)
def test_parameters_greedy_rule(
    given: dict[str, Any], samples: bool, temperature: float | None
) -> None:
    """Greedy is the documented default; a sampling value or do_sample=true turns it off."""
    assert is_sampling(parse_parameters(given)) is samples
    assert fields(**given).get("temperature") == temperature


@pytest.mark.parametrize("given", [0, -1], ids=["zero", "minus one"])
def test_parameters_top_k_off_in_both_spellings(given: int) -> None:
    """0 and -1 both turn top_k off."""
    assert fields(top_k=given)["top_k"] == 0


# Parameter and value -> refused, with the parameter's name in the text.
REFUSED: dict[str, dict[str, Any]] = {
    "max_new_tokens zero": {"max_new_tokens": 0},
    "max_new_tokens word": {"max_new_tokens": "five"},
    "max_new_tokens empty text": {"max_new_tokens": ""},
    "max_new_tokens text of a fraction": {"max_new_tokens": "1.5"},
    "temperature word": {"temperature": "hot"},
    "temperature text that is not a number": {"temperature": "nan"},
    "temperature text that is infinite": {"temperature": "inf"},
    "top_p text above one": {"top_p": "1.1"},
    "max_new_tokens bool": {"max_new_tokens": True},
    "max_new_tokens fraction": {"max_new_tokens": 1.5},
    "max_new_tokens list": {"max_new_tokens": [1]},
    "max_tokens negative": {"max_tokens": -1},
    "min_new_tokens negative": {"min_new_tokens": -1},
    "min_new_tokens above max": {"min_new_tokens": 6, "max_new_tokens": 5},
    "do_sample number": {"do_sample": 1},
    "do_sample text": {"do_sample": "true"},
    "temperature negative": {"temperature": -0.1},
    "temperature bool": {"temperature": True},
    "temperature infinite": {"temperature": float("inf")},
    "temperature not a number": {"temperature": float("nan")},
    "top_k below -1": {"top_k": -2},
    "top_k fraction": {"top_k": 0.5},
    "top_k huge": {"top_k": 10**30},
    "top_p zero": {"top_p": 0},
    "top_p above one": {"top_p": 1.1},
    "top_p list": {"top_p": [0.5]},
    "min_p negative": {"min_p": -0.1},
    "min_p above one": {"min_p": 2},
    "repetition_penalty zero": {"repetition_penalty": 0},
    "repetition_penalty text": {"repetition_penalty": "x"},
    "presence_penalty out of range": {"presence_penalty": 3},
    "frequency_penalty out of range": {"frequency_penalty": -3},
    "seed word": {"seed": "x"},
    "seed bool": {"seed": True},
    "seed fraction": {"seed": 1.5},
    "seed huge": {"seed": 2**63},
    "seed huge float": {"seed": 1e30},
    "seed endless text": {"seed": "9" * 5000},
    "seed object": {"seed": {}},
    "stop_sequences number": {"stop_sequences": 1},
    "stop_sequences list of numbers": {"stop_sequences": [1]},
    "stop_sequences empty text": {"stop_sequences": [""]},
    "stop object": {"stop": {}},
    "stop empty text": {"stop": [""]},
    "stop_token_ids no list": {"stop_token_ids": 1},
    "stop_token_ids negative": {"stop_token_ids": [-1]},
    "stop_token_ids huge": {"stop_token_ids": [2**31]},
    "include_stop_str_in_output text": {"include_stop_str_in_output": "yes"},
    "skip_special_tokens number": {"skip_special_tokens": 0},
    "ignore_eos_token number": {"ignore_eos_token": 1},
    "return_full_text text": {"return_full_text": "true"},
    "details number": {"details": 1},
    "decoder_input_details text": {"decoder_input_details": "true"},
    "truncate zero": {"truncate": 0},
    "truncate huge": {"truncate": 10**20},
    "n zero": {"n": 0},
    "best_of zero": {"best_of": 0},
    "num_beams zero": {"num_beams": 0},
    "length_penalty text": {"length_penalty": "long"},
    "length_penalty huge": {"length_penalty": 1e300},
    "top_n_tokens negative": {"top_n_tokens": -1},
    "stream text": {"stream": "true"},
    "logit_bias list": {"logit_bias": [1]},
    "logit_bias word as key": {"logit_bias": {"x": 1}},
    "logit_bias text": {"logit_bias": {"1": "x"}},
    "logit_bias infinite": {"logit_bias": {"1": float("inf")}},
    "bad_words text": {"bad_words": "x"},
    "allowed_token_ids negative": {"allowed_token_ids": [-1]},
    "priority text": {"priority": "high"},
    "priority huge": {"priority": 10**12},
    "structured_outputs text": {"structured_outputs": "x"},
    "response_format unknown type": {"response_format": {"type": "xml"}},
    "response_format without schema": {"response_format": {"type": "json_schema"}},
    "response_format of both forms": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "value": {}}
    },
    "guided_regex number": {"guided_regex": 1},
    "guided_choice text": {"guided_choice": "a"},
    "grammar without value": {"grammar": {"type": "json"}},
    "grammar unknown type": {"grammar": {"type": "xml", "value": "x"}},
    "adapter_id number": {"adapter_id": 5},
    "max_tokens zero": {"max_tokens": 0},
    "top_k beyond 32 bits": {"top_k": 1 << 31},
    "priority beyond 32 bits": {"priority": 1 << 31},
}
LARGEST = {
    "top_k": (1 << 31) - 1,
    "priority": (1 << 31) - 1,
    "truncate": (1 << 31) - 1,
    "top_n_tokens": 0,
}


@pytest.mark.parametrize(("name", "value"), LARGEST.items(), ids=LARGEST)
def test_parameters_at_their_bounds_are_taken(name: str, value: int) -> None:
    """What the engine keeps in 32 bits goes as far as they do."""
    assert getattr(parse_parameters({name: value}), name) == value


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_parameters_out_of_range_or_type_are_named(given: dict[str, Any]) -> None:
    """A wrong type or value is the client's fault, and the text names the parameter."""
    with pytest.raises(PayloadError, match=rf"^parameters\.{next(iter(given))}: "):
        fields(**given)


def test_parameters_all_faults_are_listed() -> None:
    """Two faults are told at once, one sentence each, with the value that came."""
    with pytest.raises(PayloadError) as caught:
        fields(top_p=2, temperature="né")
    assert str(caught.value) == (
        'parameters.temperature: expected a number (got "né"); '
        "parameters.top_p: Input should be less than or equal to 1 (got 2)"
    )


def test_parameters_deep_value_is_refused_shortly() -> None:
    """A value nested a thousand deep is named by its kind, not written out."""
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(PayloadError, match=r"\(got an array\)$"):
        fields(max_new_tokens=deep)


def test_parameters_two_constraints_are_refused() -> None:
    """Only one way to constrain the output may be used in a request."""
    with pytest.raises(PayloadError, match="only one of structured_outputs"):
        fields(guided_regex="a", guided_choice=["a"])


UNREAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "known": ({"top_k": 1}, []),
    "unknown": ({"nonsense": 1, "other": None}, ["nonsense", "other"]),
    "names of the class itself": (
        {"model_config": 1, "model_fields": 2, "__dict__": 3, "copy": 4, "": 5},
        ["model_config", "model_fields", "__dict__", "copy", ""],
    ),
    "without effect": (
        {"typical_p": 1, "watermark": True, "early_stopping": 0, "cached_prompt": "x"},
        ["typical_p", "watermark", "early_stopping", "cached_prompt"],
    ),
    "without effect, null": ({"typical_p": None}, []),
    "two names, one value": (
        {"min_new_tokens": 1, "min_tokens": 1, "max_new_tokens": 2, "max_tokens": 2},
        [],
    ),
    "two names, one null": ({"min_new_tokens": 1, "min_tokens": None, "max_tokens": 2}, []),
    "two names, two values": (
        {
            "min_new_tokens": 1,
            "min_tokens": 2,
            "max_new_tokens": 3,
            "max_tokens": 4,
            "ignore_eos": True,
            "ignore_eos_token": False,
        },
        [
            "min_tokens beside min_new_tokens",
            "ignore_eos beside ignore_eos_token",
            "max_tokens beside max_new_tokens",
        ],
    ),
    "length_penalty alone": ({"length_penalty": 2}, ["length_penalty"]),
    "length_penalty, one beam": ({"length_penalty": 2, "num_beams": 1}, ["length_penalty"]),
    "length_penalty, beams": ({"length_penalty": 2, "num_beams": 2}, []),
}


@pytest.mark.parametrize(("given", "names"), UNREAD.values(), ids=UNREAD)
def test_parameters_without_effect_are_listed(given: dict[str, Any], names: list[str]) -> None:
    """Names without effect are known, for one warning each."""
    assert list(unread_names(parse_parameters(given))) == names


def test_parameters_without_effect_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A name is named once, whatever number of requests bring it, and their number is bounded."""
    names = UnreadNames(most=3)
    for _ in range(2):
        names.warn(["a", "b", "a"])
    assert [record.args[-1] for record in caplog.records if record.args] == ["a", "b"]
    names.warn(["c", "d", "e"])
    assert [record.args[-1] for record in caplog.records if record.args] == ["a", "b", "c"]
    assert "no further" in caplog.messages[-1]


def test_long_name_without_effect_is_not_kept_whole() -> None:
    """1000 names of 60 MB would be 60 GB that are never freed."""
    names = UnreadNames()
    names.warn(["x" * 100_000])
    assert [len(name) < 100 for name in names._seen] == [True]


def test_parameters_every_known_name_is_tested() -> None:
    """A parameter added to the class must be added to a table of this file."""
    later = {"stream", "logprobs", "priority", "top_n_tokens", "n", "best_of", "num_beams"}
    tested = {name for given, _ in MAPPING.values() for name in given} | later
    tested |= {name for given, *_ in SAMPLING.values() for name in given}
    tested |= {"decoder_input_details", "adapter_id"}
    assert set(GenerationParameters.model_fields) <= tested


def test_beams_show_twice_as_many_tokens_at_most() -> None:
    """The bound is exact and named."""
    assert choose_candidates(parse_parameters({"num_beams": 3, "top_n_tokens": 6})).returned == 3
    with pytest.raises(PayloadError, match=r"at most twice num_beams \(6\) \(got 7\)"):
        choose_candidates(parse_parameters({"num_beams": 3, "top_n_tokens": 7}))


@pytest.mark.parametrize(
    "neutral", [{"temperature": 0.0}, {"temperature": 1.0}, {"min_p": 0.0}, {"top_p": 1.0}], ids=str
)
def test_beams_accept_neutral_values(neutral: dict[str, Any]) -> None:
    """A client that sends every default is served."""
    assert choose_candidates(parse_parameters({"num_beams": 2, **neutral})).generated == 2


def test_a_schema_of_another_kind_is_not_unpacked() -> None:
    """A property may be called schema; only TGI's json_schema wraps."""
    value = {"type": "object", "schema": {"a": 1}}
    given = {"grammar": {"type": "json", "value": value}}
    assert fields(**given)["structured_outputs"] == {"json": value}


def test_given_parameters_leave_out_null_and_keep_unknown_names() -> None:
    """Names that are methods of the model too; the other name of a parameter is ours."""
    asked = {"min_tokens": 3, "top_k": None, "stop": "x", "given": 1, "copy": 2, "odd": None}
    assert parse_parameters(asked).given() == {
        "min_new_tokens": 3, "stop": ["x"], "given": 1, "copy": 2,
    }  # fmt: skip
