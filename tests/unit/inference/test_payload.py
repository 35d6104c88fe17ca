from typing import Any

import pytest

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.pipeline import dispatch
from lmi_vllm.inference.request import lmi
from lmi_vllm.inference.request.body import decode_body, form_field
from lmi_vllm.inference.request.lmi import KnownRequests, LmiRequest, parse_lmi_request
from lmi_vllm.inference.request.sampling import Candidates
from lmi_vllm.messages import BeamSearch, RequestLimits, ServingProfile, TgiRoute

OBJECT = b'{"inputs": "x"}'
X = {"inputs": "x"}
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=B"


def multipart(*parts: tuple[str, str, bytes]) -> bytes:
    """Return a form body of (name, content type, content)."""
    out = b""
    for name, kind, content in parts:
        head = f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n'
        out += (head + (f"Content-Type: {kind}\r\n" if kind else "") + "\r\n").encode()
        out += content + b"\r\n"
    return out + b"--B--\r\n"


# Body and content type -> payload (docs/requests.md#content-types).
BODIES: dict[str, tuple[bytes, str, dict[str, Any]]] = {
    "absent and empty": (b"", "", {"inputs": ""}),
    "absent": (OBJECT, "", X),
    "json": (OBJECT, "application/json", X),
    "json, charset, capitals": (OBJECT, "Application/JSON; charset=utf-8", X),
    "json, vendor": (OBJECT, "application/vnd.x+json", X),
    "json, twice the same key": (b'{"inputs": "y", "inputs": "x"}', "application/json", X),
    "text": ("ü\n".encode(), "text/plain", {"inputs": "ü\n"}),
    "text that looks like JSON": (OBJECT, "text/plain", {"inputs": '{"inputs": "x"}'}),
    "csv inputs": (b"inputs\na\nb\n", "text/csv", {"inputs": ["a", "b"]}),
    "csv quoted, windows lines": (
        b'id,inputs\r\n1,"a, ""b""\nc"\r\n',
        "text/csv",
        {"inputs": ['a, "b"\nc']},
    ),
    "csv old mac lines": (b"inputs\ra\rb", "text/csv", {"inputs": ["a", "b"]}),
    "csv, as much as is read": (
        b"inputs" + b"," * 63 + b"\na\n" + b"\n" * 32_766,
        "text/csv",
        {"inputs": ["a"]},
    ),
    "json byte order mark": (
        b'\xef\xbb\xbf{"inputs":"\xc3\xbc"}',
        "application/json",
        {"inputs": "ü"},
    ),
    "json in UTF-16": ('{"inputs":"ü"}'.encode("utf-16"), "application/json", {"inputs": "ü"}),
    "csv byte order mark": ("\ufeffinputs\na\n".encode(), "text/csv", {"inputs": ["a"]}),
    "csv question": (
        b"question,context\nq,c\n",
        "text/csv",
        {"inputs": [{"question": "q", "context": "c"}]},
    ),
    "form": (b"data=a+b%C3%BC&x=1", FORM, {"inputs": "a bü"}),
    "form, JSON text in data": (b"data=%7B%7D", FORM, {"inputs": "{}"}),
    "form type by curl -d": (OBJECT, FORM, X),
    "multipart, typed": (multipart(("data", "application/json", OBJECT)), MULTIPART, X),
    "multipart, untyped object": (multipart(("data", "", OBJECT)), MULTIPART, X),
    "multipart, text": (
        multipart(("a", "", b"1"), ("data", "", "ü".encode())),
        MULTIPART,
        {"inputs": "ü"},
    ),
}


@pytest.mark.parametrize(("body", "kind", "payload"), BODIES.values(), ids=BODIES)
def test_payload_content_types(body: bytes, kind: str, payload: dict[str, Any]) -> None:
    """A body becomes the payload that its content type says."""
    assert decode_body(body, kind) == payload


REFUSED_BODIES: dict[str, tuple[bytes, str, str]] = {
    "cut off": (b'{"inputs": "x"', "application/json", "not valid JSON"),
    "cut off in UTF-16": ("{".encode("utf-16")[:3], "application/json", "not valid JSON"),
    "empty": (b"", "application/json", "not valid JSON"),
    "array": (b"[1]", "application/json", "must be a JSON object"),
    "text": (b'"x"', "application/json", "must be a JSON object"),
    "null": (b"null", "application/json", "must be a JSON object"),
    "NaN": (b'{"inputs": NaN}', "application/json", "not valid JSON"),
    "infinite": (b'{"inputs": 1e999}', "application/json", "not valid JSON"),
    "lone surrogate": (b'{"inputs": "\\ud800"}', "application/json", "not valid JSON"),
    "not UTF-8": (b'{"inputs": "\xff"}', "application/json", "not valid JSON"),
    "too deep": (b'{"inputs":' + b"[" * 5000, "application/json", "not valid JSON"),
    "text, not UTF-8": (b"\xff", "text/plain", "not UTF-8"),
    "csv without a known column": (b"a,b\n1,2\n", "text/csv", "inputs, question, context"),
    "csv without rows": (b"inputs\n", "text/csv", "header row"),
    "csv empty": (b"", "text/csv", "header row"),
    "csv of many lines": (b"inputs\n" + b"\n" * 32_768, "text/csv", "at most 32768 ends of lines"),
    "csv of many old lines": (b"inputs\r" + b"a\r" * 32_768, "text/csv", "at most 32768 ends"),
    "csv of many columns": (b"inputs" + b"," * 64 + b"\na\n", "text/csv", "at most 64 columns"),
    "csv cell too long": (b"inputs\n" + b"x" * 200_000, "text/csv", "not valid CSV"),
    "form without data": (b"x=1", FORM, "no field data"),
    "multipart without data": (multipart(("x", "", b"1")), MULTIPART, "no field data"),
    "multipart with a file": (multipart(("file", "", b"\xff")), MULTIPART, "route=/v1/audio"),
    "multipart data of a file": (multipart(("data", "", b"\xff")), MULTIPART, "route=/v1/audio"),
    "multipart cut off": (b"--B\r\nContent-Dis", MULTIPART, "has no empty line after its headers"),
    "multipart, no boundary": (multipart(("data", "", b"x")), "multipart/form-data", "no field"),
    "multipart, broken JSON": (
        multipart(("data", "application/json", b"{")),
        MULTIPART,
        "not valid JSON",
    ),
    "multipart, too many fields": (
        b"\r\n--B" * 1001,
        MULTIPART,
        "more than 1000 fields",
    ),
    "multipart, too many headers": (
        b"--B\r\n" + b"X: 1\r\n" * 20 + b"\r\n\r\n--B--",
        MULTIPART,
        "more than 16 headers",
    ),
    "multipart, long headers": (
        b"--B\r\nContent-Disposition: form-data; name=x" + b"y" * 5000 + b"\r\n\r\nz\r\n--B--",
        MULTIPART,
        "more than 4096 bytes",
    ),
    "multipart, many parameters": (
        b"--B\r\nContent-Disposition: form-data" + b"; a=b" * 20 + b"\r\n\r\nz\r\n--B--",
        MULTIPART,
        "or 16 parameters",
    ),
    "multipart, other lines": (
        multipart(("data", "", b"x")).replace(b"\r\n", b"\n"),
        MULTIPART,
        "lines end with CR LF",
    ),
    "multipart, base64": (
        multipart(("inputs", "", b"eA==")).replace(
            b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n", 1
        ),
        MULTIPART,
        "'inputs' of the form has a Content-Transfer-Encoding other than binary",
    ),
    "form, too many fields": (b"a&" * 1000, FORM, "more than 1000 fields"),
    "form, too many escapes": (b"data=" + b"%41" * 300_000, FORM, "262144 escaped characters"),
    "image": (b"\x89PNG", "image/png", "image/png cannot be used"),
    "audio": (b"x", "audio/wav", "audio/wav cannot be used"),
    "npy": (b"x", "application/x-npy", "cannot be used"),
    "ndlist": (b"x", "tensor/ndlist", "cannot be used"),
    "bytes": (b"x", "application/octet-stream", "cannot be used"),
}


@pytest.mark.parametrize(("body", "kind", "text"), REFUSED_BODIES.values(), ids=REFUSED_BODIES)
def test_payload_unreadable_body_is_refused(body: bytes, kind: str, text: str) -> None:
    """A body that is not what its type says is the client's fault, with the reason."""
    with pytest.raises(PayloadError, match=text):
        decode_body(body, kind)


def test_payload_form_of_as_many_fields_as_may_be() -> None:
    """The limit is that of the message."""
    fields = [(f"f{number}", "", b"") for number in range(999)]
    assert decode_body(multipart(*fields, ("data", "", b"x")), MULTIPART)["inputs"] == "x"
    with pytest.raises(PayloadError, match="more than 1000 fields"):
        decode_body(multipart(*fields, *fields[:2]), MULTIPART)


def test_payload_form_field_is_found_in_forms_only() -> None:
    """A model name may come as a field of either kind of form."""
    assert form_field(b"a=1&model_name=m&model_name=n", FORM, "model_name") == "m"
    assert form_field(multipart(("model_name", "", b"m")), MULTIPART, "model_name") == "m"
    assert form_field(b"a=1", FORM, "model_name") is None
    assert form_field(b'{"a": "' + b"&model_name=m" * 2000 + b'"}', FORM, "model_name") is None
    assert form_field(b"model_name=m", "application/json", "model_name") is None


FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "prompt": (("prompt",), "completions"),
    "inputs": (("inputs",), "generation"),
    "messages": (("messages",), "chat/completions"),
    "all three": (("messages", "inputs", "prompt"), "completions"),
    "embeddings": (("prompt_embeds",), "completions"),
    "inputs and messages": (("messages", "inputs"), "generation"),
}


@pytest.mark.parametrize(("keys", "family"), FAMILIES.values(), ids=FAMILIES)
def test_payload_dispatch_takes_first_match(keys: tuple[str, ...], family: str) -> None:
    """prompt, then inputs, then messages, whatever their values."""
    assert dispatch(dict.fromkeys(keys)) == family


def test_payload_dispatch_without_key_is_refused() -> None:
    """A payload of no family is told which keys there are."""
    with pytest.raises(PayloadError, match="must contain prompt, inputs, or messages"):
        dispatch({"text": "x"})


def request(
    inputs: object = "x", profile: dict[str, Any] | None = None, **payload: Any
) -> LmiRequest:
    """Return the request of a payload."""
    return parse_lmi_request({"inputs": inputs, **payload}, ServingProfile(**profile or {}))


# Payloads of which each is like another one, and means something else.
ALIKE: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"parameters": None},
    "empty": {"parameters": {}},
    "number": {"parameters": {"max_new_tokens": 1}},
    "number as a float": {"parameters": {"max_new_tokens": 1.0}},
    "number as a text": {"parameters": {"max_new_tokens": "1"}},
    "true": {"parameters": {"max_new_tokens": True}},
    "logprobs 1": {"parameters": {"logprobs": 1}},
    "logprobs true": {"parameters": {"logprobs": True}},
    "logprobs false": {"parameters": {"logprobs": False}},
    "stream": {"stream": True, "parameters": {"max_new_tokens": 1}},
    "stream 1": {"stream": 1, "parameters": {"max_new_tokens": 1}},
    "stream in parameters": {"parameters": {"max_new_tokens": 1, "stream": True}},
    "stop": {"parameters": {"stop": "a"}},
    "stop list": {"parameters": {"stop": ["a"]}},
    "bias": {"parameters": {"logit_bias": {"5": 1.0}}},
    "schema": {"parameters": {"guided_json": "{}"}},
    "unread": {"parameters": {"nonsense": "a"}},
    "unread, of another name": {"parameters": {"nonsens": "a"}},
    "candidates": {"parameters": {"n": 2, "do_sample": True}},
    "candidates in a stream": {"stream": True, "parameters": {"n": 2, "do_sample": True}},
    "seed": {"parameters": {"do_sample": True, "seed": 5, "details": True}},
}


def outcome(payload: dict[str, Any], known: KnownRequests | None) -> object:
    """Return the request, or what is wrong."""
    try:
        return parse_lmi_request(payload, ServingProfile(), known=known)
    except PayloadError as error:
        return error.text


@pytest.mark.parametrize("inputs", ["a", ["b"], ["a", "b"]], ids=str)
def test_request_like_an_earlier_one_is_read_as_the_first(
    inputs: object,
) -> None:
    """Whatever came before: what is kept is only used for the same, and its prompts never are."""
    known = KnownRequests()
    payloads = [{"inputs": inputs, **each} for each in ALIKE.values()]
    for payload in [*payloads, *reversed(payloads), {"inputs": "c"}]:
        assert outcome(payload, known) == outcome(payload, None), payload


def test_parameters_that_came_before_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most clients send the same ones with each prompt."""
    reads: list[object] = []
    read = lmi.parse_parameters
    monkeypatch.setattr(lmi, "parse_parameters", lambda raw: reads.append(raw) or read(raw))
    known = KnownRequests()
    for prompt in "abc":
        parsed = outcome({"inputs": prompt, "parameters": {"seed": 1, "top_p": 0.5}}, known)
        assert isinstance(parsed, LmiRequest)
        assert parsed.prompts == (prompt,)
    assert len(reads) == 1


def test_every_request_of_tgi_s_clients_has_a_seed_of_its_own() -> None:
    """Though all of them send the same parameters."""
    known, profile = KnownRequests(), ServingProfile(tgi_compat=True)
    payload = {"inputs": "a", "parameters": {"do_sample": True, "details": True}}
    seeds = {parse_lmi_request(payload, profile, known=known).seed for _ in range(3)}
    assert len(seeds) == 3


INPUTS: dict[str, tuple[object, tuple[str, ...], bool]] = {
    "text": ("a", ("a",), False),
    "list": (["a", "b"], ("a", "b"), True),
    "list of one": (["a"], ("a",), True),
    "blank": (" ", (" ",), False),
}


@pytest.mark.parametrize(("inputs", "prompts", "is_list"), INPUTS.values(), ids=INPUTS)
def test_payload_inputs_are_prompts_in_order(
    inputs: object, prompts: tuple[str, ...], is_list: bool
) -> None:
    """A list stays a list, also of one."""
    parsed = request(inputs)
    assert (parsed.prompts, parsed.is_list) == (prompts, is_list)


@pytest.mark.parametrize(
    "inputs", ["", [], [""], ["a", ""], None, 5, {}, ["a", 5], [["a"]], [None], True], ids=repr
)
def test_payload_wrong_inputs_are_refused(inputs: object) -> None:
    """Only texts that are not empty can be continued."""
    with pytest.raises(PayloadError, match=r"^inputs: "):
        request(inputs)


@pytest.mark.parametrize("parameters", [[], "x", 5, True], ids=repr)
def test_payload_parameters_must_be_object(parameters: object) -> None:
    """`parameters` is an object, or null for none."""
    with pytest.raises(PayloadError, match=r"^parameters: expected an object"):
        request(parameters=parameters)
    assert request(parameters=None) == request(parameters={}) == request()


# Payload and profile -> whether it streams (docs/answers.md#framings).
STREAMING: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "default": ({}, {}, False),
    "stream": ({"stream": True}, {}, True),
    "stream null": ({"stream": None}, {}, False),
    "in parameters": ({"parameters": {"stream": True}}, {}, True),
    "null above, true in parameters": ({"stream": None, "parameters": {"stream": True}}, {}, True),
    "false above wins": ({"stream": False, "parameters": {"stream": True}}, {}, False),
    "formatter jsonlines": ({}, {"output_formatter": "jsonlines"}, True),
    "formatter sse": ({"stream": False}, {"output_formatter": "sse"}, True),
    "formatter json": ({"stream": True}, {"output_formatter": "json"}, True),
    "formatter 3p": ({}, {"output_formatter": "3p"}, False),
    "formatter 3p_stream": ({}, {"output_formatter": "3p_stream"}, True),
    "formatter unknown": ({}, {"output_formatter": "none"}, False),
}


@pytest.mark.parametrize(("payload", "profile", "streams"), STREAMING.values(), ids=STREAMING)
def test_payload_stream_choice(
    payload: dict[str, Any], profile: dict[str, Any], streams: bool
) -> None:
    """The request, or a formatter that only streams, decides; Accept does not."""
    assert request(profile=profile, **payload).is_streaming is streams


@pytest.mark.parametrize("stream", ["true", 1, [], {}], ids=repr)
def test_payload_stream_must_be_boolean(stream: object) -> None:
    """A stream flag of another type is refused."""
    with pytest.raises(PayloadError, match=r"^stream: expected true or false"):
        request(stream=stream)


UNSTREAMABLE: dict[str, tuple[object, dict[str, Any], str]] = {
    "list": (["a", "b"], {}, "^inputs: streaming"),
    "n": ("a", {"n": 2, "do_sample": True}, "n, best_of and num_beams"),
    "best_of": ("a", {"best_of": 2, "do_sample": True}, "n, best_of and num_beams"),
    "num_beams": ("a", {"num_beams": 2}, "n, best_of and num_beams"),
}


@pytest.mark.parametrize(("inputs", "parameters", "text"), UNSTREAMABLE.values(), ids=UNSTREAMABLE)
def test_payload_that_cannot_stream_is_refused(
    inputs: object, parameters: dict[str, Any], text: str
) -> None:
    """More than one sequence needs a whole answer."""
    with pytest.raises(PayloadError, match=text):
        request(inputs, stream=True, parameters=parameters)


def test_payload_list_of_one_is_streamed() -> None:
    """LMI's client sends it always; whole, it stays a list."""
    assert request(["a"], stream=True).is_list is False
    assert request(["a"]).is_list is True


@pytest.mark.parametrize(
    ("given", "is_sampled"),
    [
        ({"temperature": 0.7}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, False),
        ({"temperature": 0, "top_p": 0.9}, False),
        ({}, False),
    ],
)
def test_payload_of_tgi_s_clients_samples_by_its_values(
    given: dict[str, Any], is_sampled: bool
) -> None:
    """They send `do_sample: false` where it is not asked for; in LMI's schema it is greedy."""
    payload = {"inputs": "a", "parameters": {"do_sample": False, **given}}
    found = [
        parse_lmi_request(payload, ServingProfile(tgi_compat=is_tgi)).sampling.get("temperature")
        != 0
        for is_tgi in (True, False)
    ]
    assert found == [is_sampled, False]


def test_payload_prompt_details_are_streamed_but_in_tgi_mode() -> None:
    """LMI has them in the last row, TGI refuses them."""
    asked = {"stream": True, "parameters": {"decoder_input_details": True}}
    assert request(**asked).decoder_input_details
    with pytest.raises(PayloadError, match="decoder_input_details"):
        request(profile={"tgi_compat": True}, **asked)


CANDIDATES: dict[str, tuple[dict[str, Any], tuple[int, int], int | None]] = {
    "one": ({}, (1, 1), None),
    "n": ({"n": 3}, (3, 3), 3),
    "best_of": ({"best_of": 3}, (3, 3), 3),
    "best_of and n": ({"best_of": 3, "n": 2}, (3, 2), 3),
    "n above best_of": ({"best_of": 2, "n": 3}, (3, 3), 3),
    "ones": ({"best_of": 1, "n": 1, "num_beams": 1}, (1, 1), None),
}


@pytest.mark.parametrize(("given", "counts", "n"), CANDIDATES.values(), ids=CANDIDATES)
def test_payload_candidates_and_returned(
    given: dict[str, Any], counts: tuple[int, int], n: int | None
) -> None:
    """The engine makes max(best_of, n) candidates; n of them, or all, are answered."""
    parsed = request(parameters={"do_sample": True, **given})
    assert parsed.candidates == Candidates(*counts)
    assert parsed.sampling.get("n") == n


@pytest.mark.parametrize("given", [{"n": 2}, {"best_of": 2}, {"n": 2, "temperature": 0}], ids=str)
def test_payload_greedy_candidates_are_refused(given: dict[str, Any]) -> None:
    """Greedy candidates would all be the same: the text names do_sample."""
    with pytest.raises(PayloadError, match="do_sample"):
        request(parameters=given)


BEAMS: dict[str, tuple[dict[str, Any], Candidates]] = {
    "width": ({"num_beams": 3}, Candidates(3, 3, BeamSearch(3, 1.0))),
    "fewer returned": ({"num_beams": 3, "n": 1}, Candidates(3, 1, BeamSearch(3, 1.0))),
    "length_penalty": (
        {"num_beams": 2, "length_penalty": 0},
        Candidates(2, 2, BeamSearch(2, 0.0)),
    ),
    "values that mean nothing": (
        {
            "num_beams": 2, "do_sample": False, "temperature": 1, "top_p": 1.0, "top_k": -1,
            "repetition_penalty": 1.0, "stop": [], "seed": 3, "best_of": 1, "top_n_tokens": 4,
        },
        Candidates(2, 2, BeamSearch(2, 1.0)),
    ),
    "widest": ({"num_beams": 10}, Candidates(10, 10, BeamSearch(10, 1.0))),
}  # fmt: skip


@pytest.mark.parametrize(("given", "candidates"), BEAMS.values(), ids=BEAMS)
def test_payload_beams(given: dict[str, Any], candidates: Candidates) -> None:
    """A beam search answers with all its beams, or the n best; it is never sampling."""
    parsed = request(parameters=given)
    assert parsed.candidates == candidates
    assert not parsed.apply_model_defaults


NOT_WITH_BEAMS: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 3}, "at most num_beams"),
    "best_of": ({"best_of": 2}, "best_of"),
    "top_n_tokens": ({"top_n_tokens": 5}, "twice num_beams"),
    "logprobs": ({"logprobs": 5}, "twice num_beams"),
    "do_sample": ({"do_sample": True}, "do_sample"),
    "temperature": ({"temperature": 0.7}, "temperature"),
    "stop": ({"stop_sequences": ["."]}, "stop_sequences"),
    "several": ({"top_p": 0.5, "logit_bias": {"5": 1}}, "top_p, logit_bias"),
    "priority": ({"priority": 1}, "priority"),
    "grammar": ({"grammar": {"type": "regex", "value": "a"}}, "grammar"),
    "prompt details": ({"decoder_input_details": True}, "decoder_input_details"),
}


@pytest.mark.parametrize(("given", "text"), NOT_WITH_BEAMS.values(), ids=NOT_WITH_BEAMS)
def test_payload_parameters_unread_by_beam_search_are_refused(
    given: dict[str, Any], text: str
) -> None:
    """VLLM's beam search looks at few parameters; the others are named, never dropped."""
    with pytest.raises(PayloadError, match=text):
        request(parameters={"num_beams": 2, **given})


@pytest.mark.parametrize(("limit", "widest"), [(20, 10), (5, 2), (0, 1), (-1, 16)], ids=str)
def test_payload_beams_are_bounded_by_logprobs(limit: int, widest: int) -> None:
    """A step looks at twice as many tokens as there are beams; the engine gives max_logprobs."""
    limits = {"limits": RequestLimits(max_logprobs=limit)}
    assert request(profile=limits, parameters={"num_beams": widest})
    with pytest.raises(PayloadError, match=r"^parameters\.num_beams: at most"):
        request(profile=limits, parameters={"num_beams": widest + 1})


# Payload and profile -> the number of alternatives asked of the engine; None: no logprobs at all.
LOGPROBS: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "plain": ({}, {}, None),
    "details": ({"parameters": {"details": True}}, {}, 0),
    "candidates": ({"parameters": {"n": 2, "do_sample": True}}, {}, 0),
    "candidates, not shown": (
        {"parameters": {"n": 2, "do_sample": True, "logprobs": False}},
        {},
        0,
    ),
    "details without": ({"parameters": {"details": True, "logprobs": False}}, {}, None),
    "logprobs true": ({"parameters": {"details": True, "logprobs": True}}, {}, 0),
    "top_n_tokens": ({"parameters": {"top_n_tokens": 3}}, {}, 3),
    "top_n_tokens over logprobs": ({"parameters": {"top_n_tokens": 3, "logprobs": 5}}, {}, 3),
    "logprobs": ({"parameters": {"logprobs": 5}}, {}, 5),
    "stream": ({"stream": True}, {}, 0),
    "stream without": ({"stream": True, "parameters": {"logprobs": False}}, {}, None),
    "stream, option off": ({"stream": True}, {"stream_logprobs": False}, None),
    "stream, tgi needs them": (
        {"stream": True, "parameters": {"logprobs": False}},
        {"tgi_compat": True, "stream_logprobs": False},
        0,
    ),
    "tgi": ({}, {"tgi_compat": True}, 0),
}


@pytest.mark.parametrize(("payload", "profile", "count"), LOGPROBS.values(), ids=LOGPROBS)
def test_payload_logprobs_only_where_shown(
    payload: dict[str, Any], profile: dict[str, Any], count: int | None
) -> None:
    """Log probabilities cost much: the engine is asked only where an answer shows them."""
    assert request(profile=profile, **payload).sampling.get("logprobs") == count


@pytest.mark.parametrize("given", [-1, 21, 1e30], ids=repr)
def test_payload_logprobs_out_of_range_is_named(given: float) -> None:
    """The number of logprobs is bounded as the engine bounds it."""
    with pytest.raises(PayloadError, match=r"^parameters\.logprobs: "):
        request(parameters={"logprobs": given})


def test_payload_fields_beside_sampling() -> None:
    """What the formatter and the engine seam need is kept as typed fields."""
    parsed = request(
        parameters={
            "details": True,
            "decoder_input_details": True,
            "return_full_text": True,
            "truncate": 5,
            "priority": -3,
            "seed": "7",
        }
    )
    assert (parsed.details, parsed.decoder_input_details, parsed.return_full_text) == (True,) * 3
    assert (parsed.truncate, parsed.priority, parsed.seed) == (5, -3, 7)
    assert parsed.sampling["prompt_logprobs"] == 1
    assert request(parameters={"priority": None}).priority == 0


def test_payload_prompt_details_need_details() -> None:
    """decoder_input_details alone asks the engine for nothing."""
    assert "prompt_logprobs" not in request(parameters={"decoder_input_details": True}).sampling


@pytest.mark.parametrize("samples", [True, False])
def test_payload_model_defaults_only_when_sampling(samples: bool) -> None:
    """The model's generation config fills in what sampling leaves open; greedy needs none."""
    assert request(parameters={"do_sample": samples}).apply_model_defaults is samples


def test_payload_tgi_keeps_stop_text_and_details() -> None:
    """TGI mode: a stop sequence stays in the text and details are on, unless told otherwise."""
    tgi = {"tgi_compat": True}
    parsed = request(profile=tgi)
    assert parsed.details
    assert parsed.sampling["include_stop_str_in_output"] is True
    told = {"include_stop_str_in_output": False, "details": False}
    parsed = request(profile=tgi, parameters=told)
    assert not parsed.details
    assert parsed.sampling["include_stop_str_in_output"] is False


def test_payload_unread_names_are_kept() -> None:
    """What has no effect is told, for one warning each."""
    assert request(parameters={"nonsense": 1, "typical_p": 0.5}).unread == ("nonsense", "typical_p")
    assert request(parameters={"adapter_id": "a", "priority": 1}).unread == (
        "adapter_id",
        "priority",
    )
    reads = {"tgi_compat": True, "uses_priority": True}
    assert request(profile=reads, parameters={"adapter_id": "a", "priority": 1}).unread == ()
    assert request(parameters={"adapters": "a", "priority": 0}).unread == ("adapters",)


# Parameters of TGI's own routes -> what differs from /invocations in TGI mode.
TGI_ROUTES: dict[str, tuple[TgiRoute, dict[str, Any], bool, bool]] = {
    "/": (TgiRoute(None, True), {}, False, False),
    "/ streaming": (TgiRoute(None, True), {"stream": True}, True, False),
    "/generate": (TgiRoute(False, False), {"stream": True}, False, False),
    "/generate_stream": (TgiRoute(True, False), {}, True, False),
    "details": (TgiRoute(False, False), {"parameters": {"details": True}}, False, True),
    "prompt details": (
        TgiRoute(False, False),
        {"parameters": {"decoder_input_details": True}},
        False,
        True,
    ),
}


@pytest.mark.parametrize(
    ("route", "payload", "streams", "details"), TGI_ROUTES.values(), ids=TGI_ROUTES
)
def test_payload_tgi_routes_have_tgi_s_defaults(
    route: TgiRoute, payload: dict[str, Any], streams: bool, details: bool
) -> None:
    """No details, and as many tokens as the context holds, unless asked otherwise."""
    profile = ServingProfile(tgi_compat=True, output_formatter="jsonlines")
    parsed = parse_lmi_request({"inputs": "p", **payload}, profile, route)
    assert (parsed.is_streaming, parsed.details) == (streams, details)
    assert parsed.sampling["max_tokens"] is None
    assert ("prompt_logprobs" in parsed.sampling) is ("decoder_input_details" in str(payload))


def test_payload_tgi_routes_take_one_prompt() -> None:
    """/generate answers with one object, so a list has no place there."""
    with pytest.raises(PayloadError, match=r"^inputs: expected text"):
        parse_lmi_request({"inputs": ["a"]}, ServingProfile(), TgiRoute(False, False))
