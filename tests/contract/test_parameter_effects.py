"""Every parameter of an LMI request has its documented effect, on the real engine.

One test a parameter, over the whole lane (payload, engine, formatter): its effect, or its refusal.
`test_every_parameter_is_here` keeps the list whole.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.lmi_lane import job_result, make_job
from lmi_vllm.inference.request.lmi import parse_lmi_request
from lmi_vllm.inference.request.parameters import GenerationParameters
from lmi_vllm.inference.response.formatters import (
    LMI_SCHEMA,
    TGI_SCHEMA,
    StreamFormatter,
    encode_results,
)
from lmi_vllm.messages import FRAMINGS, ServingProfile
from tests.contract.conftest import LoopThread

pytestmark = pytest.mark.vllm
PROMPT = "Once upon a time"
TGI = ServingProfile(tgi_compat=True)
Ask = Callable[..., Any]


@pytest.fixture
def ask(run: LoopThread, vllm_engine: Engine) -> Ask:
    """Return the answer to the common prompt with these parameters, rows when streaming."""

    async def answer(
        parameters: dict[str, Any], prompt: str, profile: ServingProfile, *, stream: bool
    ) -> Any:
        payload = {"inputs": prompt, "parameters": parameters, "stream": stream}
        request = parse_lmi_request(payload, profile)
        job = make_job(request, "effect", 0, None)
        schema = TGI_SCHEMA if profile.tgi_compat else LMI_SCHEMA
        if not request.is_streaming:
            results = [await job_result(vllm_engine, request, job, schema)]
            return orjson.loads(encode_results(results, is_list=False, schema=schema))
        formatter = StreamFormatter(request, prompt, schema, FRAMINGS["jsonlines"])
        rows = b"".join([formatter.rows(chunk) async for chunk in vllm_engine.generate(job)])
        return [json.loads(line) for line in rows.splitlines()]

    def ask_with(
        prompt: str = PROMPT,
        profile: ServingProfile | None = None,
        *,
        in_stream: bool = False,
        **parameters: Any,
    ) -> Any:
        work = answer(parameters, prompt, profile or ServingProfile(), stream=in_stream)
        return run(work)

    return ask_with


def text(answer: Any) -> str:
    """Return the generated text of a whole answer."""
    found: str = answer["generated_text"]
    return found


def count(answer: Any) -> int:
    """Return the number of generated tokens of an answer with details."""
    found: int = answer["details"]["generated_tokens"]
    return found


def ids(answer: Any) -> list[int]:
    """Return the token ids of an answer with details."""
    return [token["id"] for token in answer["details"]["tokens"]]


LONG = {"ignore_eos_token": True, "details": True}


def test_max_new_tokens_bounds_the_answer(ask: Ask) -> None:
    """30 tokens by default; what is asked for otherwise; `length` says why it ended."""
    assert count(ask(**LONG)) == 30
    short = ask(max_new_tokens=3, **LONG)
    assert (count(short), short["details"]["finish_reason"]) == (3, "length")


def test_max_tokens_is_an_alias_that_loses(ask: Ask) -> None:
    """max_tokens counts where max_new_tokens is not given."""
    assert count(ask(max_tokens=4, **LONG)) == 4
    assert count(ask(max_tokens=4, max_new_tokens=2, **LONG)) == 2


def test_min_new_tokens_keeps_the_answer_going(ask: Ask) -> None:
    """No end token before so many."""
    prompt, end = "The capital of France is", {"max_new_tokens": 60, "details": True}
    plain = ask(prompt, **end)
    assert plain["details"]["finish_reason"] == "eos_token"
    longer = ask(prompt, min_new_tokens=count(plain) + 5, **end)
    assert count(longer) >= count(plain) + 5


def test_do_sample_false_is_greedy_and_true_samples(ask: Ask) -> None:
    """Greedy is the default; sampling without a seed gives other texts."""
    assert text(ask()) == text(ask(do_sample=False, temperature=1.5)) == text(ask(temperature=0))
    assert len({text(ask(do_sample=True, temperature=1.8)) for _ in range(6)}) > 1


def test_temperature_flattens(ask: Ask) -> None:
    """Near 0 is greedy, high is not; with a seed both are repeatable."""
    greedy = text(ask())
    assert text(ask(temperature=0.001, seed=1)) == greedy
    assert text(ask(temperature=2.0, seed=1)) != greedy


@pytest.mark.parametrize(("name", "value"), [("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)])
def test_cuts_to_the_most_probable_token_are_greedy(ask: Ask, name: str, value: float) -> None:
    """top_k=1, a tiny top_p and min_p=1 leave one token to choose from, at any temperature."""
    assert text(ask(temperature=2.0, seed=3, **{name: value})) == text(ask())
    assert text(ask(temperature=2.0, seed=3)) != text(ask())


def test_top_k_off_in_both_spellings(ask: Ask) -> None:
    """0 and -1 are the same: no cut."""
    answers = [text(ask(temperature=1.5, seed=4, top_k=value)) for value in (0, -1)]
    assert answers[0] == answers[1] == text(ask(temperature=1.5, seed=4))


@pytest.mark.parametrize(
    ("name", "value"),
    [("repetition_penalty", 2.0), ("presence_penalty", 2.0), ("frequency_penalty", 2.0)],
)
def test_penalties_avoid_repetition(ask: Ask, name: str, value: float) -> None:
    """With a penalty more of the tokens are new ones."""
    plain = ids(ask(max_new_tokens=250, **LONG))
    punished = ids(ask(max_new_tokens=250, **LONG, **{name: value}))
    assert len(set(punished)) > len(set(plain))


def test_seed_repeats_a_sampled_answer(ask: Ask) -> None:
    """The same seed gives the same text, as a number or its text, and is told in the details."""
    first = ask(do_sample=True, temperature=1.5, seed=7, details=True)
    assert first["details"]["seed"] == 7
    assert text(ask(do_sample=True, temperature=1.5, seed="7")) == text(first)
    assert text(ask(do_sample=True, temperature=1.5, seed=8)) != text(first)


@pytest.mark.parametrize("name", ["stop_sequences", "stop"])
def test_stop_ends_the_text_before_it(ask: Ask, name: str) -> None:
    """The text ends before the stop sequence, wherever it lies in its tokens."""
    plain = text(ask())
    stop = plain[5:8]
    answer = ask(details=True, **{name: [stop]})
    assert text(answer) == plain[: plain.index(stop)]
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert text(ask(profile=TGI, **{name: stop})[0]) == plain[: plain.index(stop) + 3]


def test_include_stop_str_in_output_keeps_it(ask: Ask) -> None:
    """Kept when asked for; in TGI mode unless told otherwise."""
    stop = text(ask())[5:8]
    assert text(ask(stop=[stop], include_stop_str_in_output=True)).endswith(stop)
    told = ask(profile=TGI, stop=[stop], include_stop_str_in_output=False)
    assert not text(told[0]).endswith(stop)


def test_stop_token_ids_end_the_answer(ask: Ask) -> None:
    """The answer ends at the token, which is a stop sequence to LMI."""
    third = ids(ask(details=True))[2]
    answer = ask(details=True, stop_token_ids=[third])
    assert ids(answer)[-1] == third
    assert count(answer) <= 3
    assert answer["details"]["finish_reason"] == "stop_sequence"


def test_ignore_eos_token_goes_on(ask: Ask) -> None:
    """The model's own end token does not end the answer."""
    prompt = "The capital of France is"
    assert ask(prompt, details=True, max_new_tokens=60)["details"]["finish_reason"] == "eos_token"
    assert count(ask(prompt, max_new_tokens=60, **LONG)) == 60


def test_skip_special_tokens_shows_the_end_token(ask: Ask) -> None:
    """Special tokens are left out of the text unless asked for."""
    prompt, long = "The capital of France is", {"max_new_tokens": 60, "ignore_eos_token": True}
    plain, shown = text(ask(prompt, **long)), text(ask(prompt, skip_special_tokens=False, **long))
    assert len(shown) > len(plain)


def test_spaces_between_special_tokens_is_taken(ask: Ask) -> None:
    """The value reaches the engine; this tokenizer writes no blanks either way."""
    assert text(ask(spaces_between_special_tokens=False)) == text(ask())


def test_return_full_text_puts_the_prompt_in_front(ask: Ask) -> None:
    """Whole and streamed; the tokens never hold the prompt."""
    whole = ask(return_full_text=True, details=True)
    assert text(whole) == PROMPT + text(ask())
    assert ids(whole) == ids(ask(details=True))
    assert ask(in_stream=True, return_full_text=True)[-1]["generated_text"] == text(whole)


def test_details_hold_tokens_and_reason(ask: Ask) -> None:
    """Without details there is only the text; with them the tokens add up to it."""
    assert set(ask()) == {"generated_text"}
    answer = ask(details=True)
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == text(answer)
    assert all(token["log_prob"] == token["logprob"] for token in answer["details"]["tokens"])


def test_decoder_input_details_list_the_prompt_tokens(ask: Ask) -> None:
    """`prefill` has every prompt token but the first, in a stream's last row too; alone nothing."""
    prefill = ask(details=True, decoder_input_details=True)["details"]["prefill"]
    assert "".join(token["text"] for token in prefill).strip() in PROMPT
    assert len(prefill) >= 3
    assert set(ask(decoder_input_details=True)) == {"generated_text"}
    *rows, last = ask(in_stream=True, details=True, decoder_input_details=True)
    assert last["details"]["prefill"] == prefill
    assert not any("details" in row for row in rows)
    for in_stream in (False, True):  # vLLM's own name asks for the same
        asked = ask(in_stream=in_stream, details=True, prompt_logprobs=1)
        assert (asked[-1] if in_stream else asked)["details"]["prefill"] == prefill


def test_truncate_keeps_the_end_of_the_prompt(ask: Ask) -> None:
    """The last N tokens count, not the first."""
    longer = "No one knows the name of the king. " + PROMPT
    cut = ask(longer, truncate=5, details=True, decoder_input_details=True)
    whole = ask(longer, details=True, decoder_input_details=True)
    kept, all_tokens = (
        [token["id"] for token in answer["details"]["prefill"]] for answer in (cut, whole)
    )
    assert kept == all_tokens[-4:]


def test_n_and_best_of_rank_candidates(ask: Ask) -> None:
    """best_of makes them, n says how many are answered, the most probable first."""
    sampling = {"do_sample": True, "temperature": 1.5, "seed": 5, "max_new_tokens": 12}
    for given, others in (({"n": 3}, 2), ({"best_of": 4}, 3), ({"best_of": 4, "n": 2}, 1)):
        details = ask(**sampling, **given)["details"]
        sequences = [details, *details["best_of_sequences"]]
        sums = [sum(token["logprob"] for token in one["tokens"]) for one in sequences]
        assert len(sequences) == others + 1
        assert sums == sorted(sums, reverse=True)
    assert set(ask(**sampling, best_of=3, n=1)) == {"generated_text"}
    with pytest.raises(PayloadError, match="do_sample"):
        ask(n=2)
    with pytest.raises(PayloadError, match="cannot be streamed"):
        ask(in_stream=True, best_of=2, do_sample=True)


def test_num_beams_finds_a_more_probable_text(ask: Ask) -> None:
    """The best beam is no less probable than the greedy text; as many sequences as beams."""
    details = ask(num_beams=4, length_penalty=0, **LONG)["details"]
    greedy = ask(**LONG)["details"]
    best, plain = (sum(token["logprob"] for token in one["tokens"]) for one in (details, greedy))
    assert best >= plain - 1e-3
    assert len(details["best_of_sequences"]) == 3
    with pytest.raises(PayloadError, match="half of max_logprobs"):
        ask(num_beams=11)
    with pytest.raises(PayloadError, match="cannot be streamed"):
        ask(in_stream=True, num_beams=2)


def test_length_penalty_ranks_beams(ask: Ask) -> None:
    """It decides among beams of several lengths, and means nothing without them."""
    prompt, beams = "The capital of France is", {"num_beams": 4, "max_new_tokens": 60, "n": 1}
    short, long = (text(ask(prompt, length_penalty=penalty, **beams)) for penalty in (-10, 10))
    assert len(short) < len(long)
    assert text(ask(length_penalty=3)) == text(ask())


def test_top_n_tokens_shows_alternatives(ask: Ask) -> None:
    """N tokens for each position, the most probable first; above max_logprobs refused."""
    details = ask(details=True, top_n_tokens=3)["details"]
    for top, token in zip(details["top_tokens"], details["tokens"], strict=True):
        assert [one["logprob"] for one in top] == sorted((o["logprob"] for o in top), reverse=True)
        assert (len(top), top[0]["id"]) == (3, token["id"])
    assert all(len(row["top_tokens"]) == 2 for row in ask(in_stream=True, top_n_tokens=2))
    with pytest.raises(PayloadError, match="expected 0 to 20"):
        ask(top_n_tokens=21)


def test_logprobs_false_leaves_them_out(ask: Ask) -> None:
    """In rows and in details; a number is taken as it is."""
    for rows in (ask(in_stream=True), ask(details=True, logprobs=3)["details"]["tokens"]):
        assert all("logprob" in (row.get("token") or row) for row in rows)
    assert all("logprob" not in row["token"] for row in ask(in_stream=True, logprobs=False))
    tokens = ask(details=True, logprobs=False)["details"]["tokens"]
    assert all(set(token) == {"id", "text"} for token in tokens)


def test_prompt_logprobs_are_prefill(ask: Ask) -> None:
    """The engine's prompt log probabilities come as `prefill`."""
    assert len(ask(details=True, prompt_logprobs=1)["details"]["prefill"]) >= 3


def test_logit_bias_forces_and_forbids(ask: Ask) -> None:
    """+100 is always taken, -100 never."""
    first = ids(ask(details=True))[0]
    assert set(ids(ask(logit_bias={"300": 100}, max_new_tokens=4, **LONG))) == {300}
    assert ids(ask(details=True, logit_bias={str(first): -100}))[0] != first


def test_bad_words_are_never_generated(ask: Ask) -> None:
    """As the tokenizer writes them in a text, with a blank: a word, and two together."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    plain = text(ask(max_new_tokens=60)).split()
    for words in (*plain[1:5], " ".join(plain[1:3])):
        form = tokenizer.encode(f" {words}", add_special_tokens=False)
        seen = ids(ask(max_new_tokens=60, details=True, bad_words=[words]))
        assert form not in [seen[start : start + len(form)] for start in range(len(seen))], words
    assert seen != ids(ask(max_new_tokens=60, details=True))


def test_allowed_token_ids_are_the_only_ones(ask: Ask) -> None:
    """Nothing else is generated."""
    assert set(ids(ask(allowed_token_ids=[300, 301], max_new_tokens=6, **LONG))) <= {300, 301}


@pytest.mark.parametrize(
    "parameters",
    [
        {"guided_regex": "[0-9]{3}"},
        {"guided_json": {"type": "integer", "minimum": 100, "maximum": 999}},
        {"guided_choice": ["123", "456"]},
        {"guided_grammar": "root ::= [0-9] [0-9] [0-9]"},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"grammar": {"type": "regex", "value": "[0-9]{3}"}},
        {"grammar": {"type": "json", "value": {"type": "integer", "minimum": 100, "maximum": 999}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"enum": [123, 456]}},
            }
        },
    ],
    ids=lambda parameters: json.dumps(parameters)[:40],
)
def test_constraints_bind_the_answer(ask: Ask, parameters: dict[str, Any]) -> None:
    """Every spelling of a constraint is obeyed: three digits, whatever the model would say."""
    answer = text(ask(**parameters)).strip()
    assert len(answer) == 3
    assert answer.isdigit()


def test_priority_changes_no_text(ask: Ask) -> None:
    """It orders requests under scheduling_policy=priority; else a warning names it, once."""
    assert text(ask(priority=1)) == text(ask(priority=0)) == text(ask())


@pytest.mark.parametrize(
    "parameters",
    [
        {"typical_p": 0.2}, {"watermark": True}, {"early_stopping": True}, {"cached_prompt": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_parameters_without_effect_change_nothing(ask: Ask, parameters: dict[str, Any]) -> None:
    """TGI's and HF's features are accepted; a warning names them (test_parameters.py)."""
    assert text(ask(**parameters)) == text(ask())


def test_stream_inside_parameters_streams(ask: Ask) -> None:
    """`stream` may stand among the parameters; the rows are the whole answer's tokens."""
    rows = ask(in_stream=True, details=True)
    assert [row["token"]["id"] for row in rows] == ids(ask(details=True))
    assert rows[-1]["details"]["generated_tokens"] == len(rows)


def test_every_parameter_is_here() -> None:
    """A parameter added to the class needs a test of its effect in this file.

    But for `adapters` and `adapter_id`: tests/web/test_adapter_selection.py.
    """
    source = Path(__file__).read_text(encoding="utf-8")
    missing = [name for name in GenerationParameters.model_fields if name not in source]
    assert missing == []
