"""With tgi_compat the hub's own client gets text, details and streams from the real engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from integration.client import call
from integration.conftest import ServerProcess, start_server

pytestmark = pytest.mark.vllm
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a demo server in TGI mode."""
    folder: Path = tmp_path_factory.mktemp("tgi")
    server: ServerProcess = start_server(
        folder, "--demo", "--port", "0", environ={"OPTION_TGI_COMPAT": "true"}, is_forked=True
    )
    address = server.url_when_ready()
    yield address
    server.kill()


def test_hub_client_text_details_and_stream(url: str) -> None:
    """All four forms of the client's text_generation tell the same story."""
    client = InferenceClient(model=url)
    text = client.text_generation(PROMPT, max_new_tokens=20)
    assert text
    whole = client.text_generation(
        PROMPT, max_new_tokens=20, details=True, decoder_input_details=True, top_n_tokens=2
    )
    assert whole.generated_text == text
    details = whole.details
    assert details.generated_tokens == len(details.tokens)
    assert all(
        isinstance(token.logprob, float) for token in (*details.tokens, *details.prefill[1:])
    )
    assert [len(top) for top in details.top_tokens] == [2] * len(details.tokens)
    pieces = list(client.text_generation(PROMPT, max_new_tokens=20, stream=True))
    assert "".join(pieces) == text
    rows = list(client.text_generation(PROMPT, max_new_tokens=20, stream=True, details=True))
    assert [row.index for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1].generated_text == text
    assert rows[-1].details.generated_tokens == len(rows) == details.generated_tokens
    assert rows[-1].details.finish_reason == details.finish_reason


def test_chats_of_tgi_s_clients_are_answered(url: str) -> None:
    """The names of its examples, nulls, and the tokens of a chat."""
    client = InferenceClient(model=url)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = client.chat_completion(messages, max_tokens=12, temperature=0.01).choices[0].message
    assert text.content
    nulls = dict.fromkeys(("n", "stop", "logprobs", "tools", "tool_choice", "frequency_penalty"))
    body = {"model": "tgi", "messages": messages, "max_tokens": 12, "temperature": 0.01, **nulls}
    assert call(url, "/v1/chat/completions", body).status == 200
    assert call(url, "/v1/chat/completions", body | {"model": "other"}).status == 404
    found = call(url, "/chat_tokenize", body).json()
    assert messages[0]["content"] in found["templated_text"]
    pieces = [token["text"] for token in found["tokenize_response"]]
    assert "".join(pieces) == found["templated_text"]
    assert call(url, "/chat_tokenize", {"messages": "x"}).status == 422


def test_prefill_has_every_token_of_the_prompt(url: str) -> None:
    """The first without a log probability; each candidate has all of it, and its own seed."""
    parameters = {
        "best_of": 2, "do_sample": True, "seed": 3, "max_new_tokens": 4,
        "decoder_input_details": True, "details": True,
    }  # fmt: skip
    body = {"inputs": PROMPT, "parameters": parameters}
    details = call(url, "/generate", body).json()["details"]
    ids = [token["id"] for token in call(url, "/tokenize", {"inputs": PROMPT}).json()]
    (other,) = details["best_of_sequences"]
    for sequence in (details, other):
        assert [token["id"] for token in sequence["prefill"]] == ids
        assert sequence["prefill"][0]["logprob"] is None
    assert {details["seed"], other["seed"]} == {3, 4}
    body["parameters"] = {**parameters, "decoder_input_details": False}
    (other,) = call(url, "/generate", body).json()["details"]["best_of_sequences"]
    assert other["prefill"] == []


def test_text_begins_after_a_prompt_that_ends_with_a_broken_character(url: str) -> None:
    """Whole and streamed, nothing of the prompt is in the text, and its words end nothing."""
    client = InferenceClient(model=url)
    prompt = "The word is kumquat. It is \N{REPLACEMENT CHARACTER}"
    text = client.text_generation(prompt, max_new_tokens=9, stop=["kumquat"])
    pieces = list(client.text_generation(prompt, max_new_tokens=9, stop=["kumquat"], stream=True))
    assert "".join(pieces) == text != ""
    assert "The word" not in text


def test_stop_sequence_stays_in_the_text(url: str) -> None:
    """TGI keeps the stop sequence that ended the text, and calls it stop_sequence."""
    client = InferenceClient(model=url)
    whole = client.text_generation(PROMPT, stop=["is"], details=True, return_full_text=False)
    assert whole.generated_text.endswith("is") or whole.details.finish_reason == "eos_token"
    text = client.text_generation("Once upon a time", stop=[" the"], details=True)
    assert text.generated_text.endswith(" the")
    assert text.details.finish_reason == "stop_sequence"


def test_grammar_seed_and_best_of(url: str) -> None:
    """A grammar binds, a seed repeats, best_of ranks."""
    client = InferenceClient(model=url)
    bound = client.text_generation(
        PROMPT, grammar={"type": "regex", "value": "[0-9]{4}"}, max_new_tokens=20
    )
    assert len(bound) == 4
    assert bound.isdigit()
    sampled = {
        client.text_generation(PROMPT, do_sample=True, temperature=1.5, seed=5) for _ in range(2)
    }
    assert len(sampled) == 1
    best = client.text_generation(PROMPT, best_of=3, do_sample=True, details=True)
    assert len(best.details.best_of_sequences) == 2


def test_seed_of_details_repeats_each_candidate(url: str) -> None:
    """TGI draws a seed for a sampled answer; with it the same text comes again."""
    parameters = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 8, "details": True}
    asked = {"inputs": PROMPT, "parameters": {**parameters, "best_of": 2}}
    best = call(url, "/generate", asked).json()
    (other,) = best["details"]["best_of_sequences"]
    for text, seed in (
        (best["generated_text"], best["details"]["seed"]),
        (other["generated_text"], other["seed"]),
    ):
        again = {"inputs": PROMPT, "parameters": {**parameters, "seed": seed}}
        assert call(url, "/generate", again).json()["generated_text"] == text
    greedy = {"inputs": PROMPT, "parameters": {"details": True, "max_new_tokens": 1}}
    assert call(url, "/generate", greedy).json()["details"]["seed"] is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_answer_goes_on_with_the_assistant_s_last_message(url: str, path: str) -> None:
    """As TGI's clients prefill answers; vLLM's own field says otherwise."""
    user = {"role": "user", "content": "What is the capital of France?"}
    messages = [user, {"role": "assistant", "content": "The capital of"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}

    def answered(**fields: object) -> str:
        answer = call(url, path, {**body, **fields}).json()["choices"][0]
        return str(answer["message"]["content"])

    assert answered().startswith(" France")
    assert answered(add_generation_prompt=True).startswith("The capital")
    parts = [{"type": "text", "text": "The capital of"}]
    assert answered(messages=[user, {"role": "assistant", "content": parts}]).startswith(" France")
    assert answered(stream=False, tools=[], tool_choice="auto").startswith(" France")
    text = call(url, "/chat_tokenize", {"messages": messages}).json()["templated_text"]
    assert text.endswith("The capital of")


def test_adapter_id_answers_with_the_adapter(url: str) -> None:
    """The demo's capitals adapter answers in capitals."""
    text = InferenceClient(model=url).text_generation(
        "The river runs", adapter_id="capitals", max_new_tokens=10
    )
    assert text == text.upper()
    with pytest.raises(ValidationError, match="nobody"):
        InferenceClient(model=url).text_generation("x", adapter_id="nobody", details=True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize("kind", ["json", "json_object", "regex"])
def test_formats_of_tgi_s_clients_bind_a_chat(url: str, path: str, kind: str) -> None:
    """A schema beside `json_object` is what huggingface_hub's types have."""
    value = "true|false" if kind == "regex" else {"type": "boolean"}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    answer = call(url, path, {**body, "response_format": {"type": kind, "value": value}})
    assert answer.json()["choices"][0]["message"]["content"] in ("true", "false")


def test_tokenize_is_tgi_s_with_inputs_and_vllm_s_with_prompt(url: str) -> None:
    """TGI's tokens cover the text character by character; vLLM's object stays reachable."""
    text = "Die Straße, naïve 🌍 end"
    tokens = call(url, "/tokenize", {"inputs": text}).json()
    assert all(text[t["start"] : t["stop"]] == t["text"] for t in tokens)
    covered = {index for t in tokens for index in range(t["start"], t["stop"])}
    assert covered == set(range(len(text)))
    theirs = call(url, "/tokenize", {"prompt": text}).json()
    assert theirs["tokens"] == [token["id"] for token in tokens]
    bare = call(url, "/tokenize", {"inputs": text, "add_special_tokens": False}).json()
    assert [t["id"] for t in tokens if t["stop"]] == [t["id"] for t in bare]


def test_info_names_the_model_and_its_length(url: str) -> None:
    """The bounds that clients read are the server's own."""
    info = call(url, "/info").json()
    assert info["max_total_tokens"] == 2048
    assert info["max_input_tokens"] == 2047
    assert info["model_id"]
