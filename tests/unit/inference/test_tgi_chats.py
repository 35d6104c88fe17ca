"""Bodies of TGI's clients on OpenAI's routes become those that vLLM reads (`tgi_compat`)."""

from typing import Any

import pytest

from lmi_vllm.inference.request.lmi import LmiRequest, parse_lmi_request
from lmi_vllm.inference.request.tgi import with_tgi_meaning
from lmi_vllm.messages import ServingProfile

USER = {"role": "user", "content": "x"}
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}
CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {"a": "\u00fc"}}}
SCHEMA = {"type": "object"}


def understood(profile: ServingProfile | None = None, **body: Any) -> dict[str, Any]:
    """Return the body as vLLM gets it."""
    return with_tgi_meaning(body, profile or ServingProfile(tgi_compat=True), lambda _: False)


def said(content: object, **fields: Any) -> list[Any]:
    """Return a chat that ends with a message of the assistant."""
    return [USER, {"role": "assistant", "content": content, **fields}]


# The messages -> whether the answer goes on with the last one.
CHATS: dict[str, tuple[Any, bool]] = {
    "text": (said("The"), True),
    "parts": (said([{"type": "text", "text": "The"}]), True),
    "user": ([USER], False),
    "empty": (said(" "), False),
    "no parts": (said([]), False),
    "a picture": (said([{"type": "image_url"}]), False),
    "nothing": (said(None), False),
    "a call": (said("The", tool_calls=[CALL]), False),
    "a batch": ([said("The")], False),
    "none": ([], False),
    "no list": ("x", False),
}


@pytest.mark.parametrize(("messages", "goes_on"), CHATS.values(), ids=CHATS)
def test_chat_goes_on_with_an_assistant_s_text(messages: Any, goes_on: bool) -> None:
    """TGI cuts the prompt after the text of a last message that an assistant wrote."""
    found = understood(messages=messages)
    assert {name: found[name] for name in GOES_ON if name in found} == (GOES_ON if goes_on else {})


@pytest.mark.parametrize("given", [{name: value} for name, value in GOES_ON.items()])
def test_chat_with_vllm_s_own_field_is_left_alone(given: dict[str, bool]) -> None:
    """Either of the fields says how the prompt ends."""
    found = understood(messages=said("The"), **given)
    assert {name: found[name] for name in GOES_ON if name in found} == given


def test_chat_of_a_model_that_embeds_is_left_alone() -> None:
    """It has no answer that could go on."""
    profile = ServingProfile(tgi_compat=True, task="embed")
    assert GOES_ON.keys().isdisjoint(understood(profile, messages=said("The")))


# Fields of a chat -> what vLLM gets of them.
TOOLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"tools": [], "tool_choice": "auto"}, {}),
    "null": ({"tools": None, "tool_choice": "required"}, {}),
    "name": (
        {"tools": [], "tool_choice": "f"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    "arguments": (
        {"tools": [{"type": "function", "function": {"name": "f", "arguments": SCHEMA}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
    ),
    "parameters": (
        {"tools": [{"function": {"parameters": SCHEMA, "arguments": {}}}], "tool_choice": "auto"},
        {"tools": [{"function": {"parameters": SCHEMA, "arguments": {}}}], "tool_choice": "auto"},
    ),
    "wrong": ({"tools": ["f", {"function": 1}]}, {"tools": ["f", {"function": 1}]}),
    "no list": ({"tools": "f", "tool_choice": {}}, {"tools": "f", "tool_choice": {}}),
}


@pytest.mark.parametrize(("given", "expected"), TOOLS.values(), ids=TOOLS)
def test_tools_have_openai_s_form(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """An empty list is none, and `arguments` is TGI's name of a tool's schema."""
    found = understood(messages=[USER], **given)
    assert {name: found[name] for name in ("tools", "tool_choice") if name in found} == expected


def test_calls_of_older_answers_have_their_arguments_as_text() -> None:
    """TGI 2 answered an object, which its clients send back."""
    (_, message) = understood(messages=said(None, tool_calls=[CALL, "x"]))["messages"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":"\u00fc"}'
    assert message["tool_calls"][1] == "x"
    assert CALL["function"] == {"name": "f", "arguments": {"a": "\u00fc"}}  # the payload's own


def parsed(is_tgi: bool = True, **parameters: Any) -> LmiRequest:
    """Return the request of these parameters."""
    profile = ServingProfile(tgi_compat=is_tgi)
    return parse_lmi_request({"inputs": "a", "parameters": parameters}, profile)


def test_sampled_answers_with_details_have_a_seed() -> None:
    """A new one for each request, unless it has its own; the engine gets it."""
    seeds = {parsed(do_sample=True, details=True).seed for _ in range(9)}
    assert len(seeds) == 9
    assert all(seed is not None and 0 <= seed < 1 << 53 for seed in seeds)
    drawn = parsed(temperature=0.5, decoder_input_details=True)
    assert drawn.sampling["seed"] == drawn.seed
    assert parsed(do_sample=True, details=True, seed=0).seed == 0


@pytest.mark.parametrize(
    "parameters",
    [
        {"details": True},
        {"do_sample": True},
        {"do_sample": True, "details": True, "is_tgi": False},
    ],
    ids=["greedy", "details unasked", "LMI"],
)
def test_other_answers_have_no_seed_of_their_own(parameters: dict[str, Any]) -> None:
    """Seeded requests are sampled one by one, so a seed that is not shown is not drawn."""
    request = parsed(**parameters)
    assert request.seed is None
    assert "seed" not in request.sampling
