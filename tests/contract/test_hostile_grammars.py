"""No schema, regular expression or grammar stalls or ends the real engine."""

import asyncio
import contextlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest

from lmi_vllm.engine.base import GRAMMAR_SOURCE, Engine
from lmi_vllm.engine.vllm.workarounds import is_affected
from lmi_vllm.errors import PayloadError
from lmi_vllm.features.grammar_trials import guard
from lmi_vllm.features.grammar_trials.queue import FairExecutor
from lmi_vllm.messages import GenerationJob, OpenAICall
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from tests.contract.conftest import LoopThread, collect, start_demo_engine
from tests.support.slowdown import slowdown

pytestmark = pytest.mark.vllm
PROMPT = "Once upon a time"
OPTIONAL = {f"p{index}": {} for index in range(300)}
WIDE = {"type": "object", "properties": OPTIONAL, "minProperties": 150}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(2000):
    DEEP = {"type": "array", "items": DEEP}


def job(constraint: dict[str, Any], max_tokens: int = 8) -> GenerationJob:
    """Return a greedy job bound to a constraint."""
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "structured_outputs": constraint}
    return GenerationJob("bound", PROMPT, sampling)


async def ended(before: set[psutil.Process]) -> None:
    """Wait until there are no more child processes than before; what is ended takes its time."""
    async with asyncio.timeout(60):
        while set(psutil.Process().children()) != before:  # noqa: ASYNC110 (the kernel has no event)
            await asyncio.sleep(0.01)


# On a busy machine the walk may meet the other bound first.
TOO_SLOW = "one token of an answer|LMI_GRAMMAR_TIMEOUT"
OTHER_SCHEMA = {"type": "json_schema", "json_schema": {"type": "strng"}}
# The grammar library of vLLM 0.31 reads such a class as one of letters that are not ASCII.
NO_LETTER = "only ASCII letters in a class" if is_affected("vllm", "0.32") else ""
# Constraint -> what the refusal says; either of two where a slow machine meets another bound first.
# Each of them did harm, or would, without the guard.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "compiles for a minute": ({"json": WIDE}, "LMI_GRAMMAR_TIMEOUT|the check of it takes"),
    "nested repetition": ({"regex": "((a{1,100}){1,100}){1,100}"}, TOO_SLOW),
    "ambiguous stars": ({"regex": "(.*.*.*)*x"}, TOO_SLOW),
    "ambiguous grammar": ({"grammar": 'root ::= s\ns ::= s s s s | "a" | ""'}, TOO_SLOW),
    "nested too deeply": ({"json": DEEP}, "nested too deeply"),
    "no grammar": ({"grammar": "root ::= ("}, "grammar"),
    "no regular expression": ({"regex": "(["}, "regex"),
    "schema of itself": ({"json": {"$ref": "#"}}, "no text matches"),
    "grammar of itself": ({"grammar": "root ::= root"}, "no text matches"),
    "regular expression of no letter": ({"regex": r"[^\s\S]"}, NO_LETTER or "no text matches"),
    "no letter after others": (
        {"regex": r"ab[^\s\S]"},
        NO_LETTER or "after token [12] neither more",
    ),
    "grammar without an end": ({"grammar": 'root ::= "a" b\nb ::= b "b"'}, "after token 1 neither"),
    "look-ahead": ({"json": {"type": "string", "pattern": "^(?!a)[a-c]{3}$"}}, "would ignore"),
    "look-ahead of a name": (
        {"json": {"type": "object", "patternProperties": {"^(?=b)[ab]$": {}}}},
        "would ignore",
    ),
    "look-behind": ({"json": {"type": "string", "pattern": "^a(?<=b)c$"}}, "look-behind"),
    "not anything": ({"json": {"not": {}}}, 'no text matches it: "not" of anything'),
    "any of none": ({"json": {"anyOf": []}}, 'no text matches it: "anyOf": \\[\\]'),
    "anchor in the middle": ({"regex": "a^b"}, "where other letters stand"),
    "structural tag of another schema": (
        {"structural_tag": json.dumps({"type": "structural_tag", "format": OTHER_SCHEMA})},
        "refused: .*strng",
    ),
    "old structural tag": ({"structural_tag": '{"structures": []}'}, "lacks 'triggers'"),
    "backreference": ({"json": {"type": "string", "pattern": r"^(a|b)\1$"}}, "backreference"),
    "unknown escape": ({"json": {"type": "string", "pattern": r"\Aab"}}, "does not know"),
}


@pytest.mark.parametrize(("constraint", "text"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_constraint_is_refused_and_others_go_on(
    run: LoopThread, vllm_engine: Engine, constraint: dict[str, Any], text: str
) -> None:
    """A constraint that would stall the engine is the client's fault, and no other one waits."""

    async def scenario() -> None:
        before = set(psutil.Process().children())
        hostile = asyncio.create_task(collect(vllm_engine, job(constraint, 500)))
        others = [GenerationJob(f"other-{index}", PROMPT, {"max_tokens": 20}) for index in range(4)]
        answers = await asyncio.gather(*(collect(vllm_engine, other) for other in others))
        assert all(chunks[-1].finish_reason for chunks in answers)
        with pytest.raises(PayloadError, match=text):
            await hostile
        await ended(before)
        await vllm_engine.check_health()

    run(scenario())


def test_refused_constraint_is_remembered(run: LoopThread, vllm_engine: Engine) -> None:
    """A verdict is remembered: asking again costs nothing, on both lanes."""
    constraint = {"regex": "((b{1,100}){1,100}){1,100}"}
    for _ in range(2):
        with pytest.raises(PayloadError, match="refused"):
            run(collect(vllm_engine, job(constraint, 500)))
    body = {"prompt": PROMPT, "structured_outputs": constraint, "max_tokens": 500}
    reply = run(vllm_engine.answer_openai(OpenAICall("completions", body, {}, "hostile")))
    error = orjson.loads(reply.body)["error"]
    assert (reply.status, error["type"]) == (400, "BadRequestError")
    assert re.search(TOO_SLOW, error["message"])


HARMLESS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[0-9]{3}-[a-z]{1,20}"},
    "email": {"regex": r"[a-z0-9._%+-]{1,30}@[a-z0-9.-]{1,30}\.[a-z]{2,6}"},
    "choice": {"choice": ["yes", "no"]},
    "any object": {"json_object": True},
    "grammar": {"grammar": 'root ::= "a" root | "b"'},
    "arithmetic": {
        "grammar": 'root ::= e\ne ::= t ("+" t)*\nt ::= f ("*" f)*\nf ::= [0-9]+ | "(" e ")"'
    },
    "schema": {
        "json": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 50},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 20},
                "address": {
                    "type": "object",
                    "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
                    "required": ["street"],
                },
                "kind": {"anyOf": [{"const": "a"}, {"enum": ["b", "c"]}, {"type": "null"}]},
            },
            "required": ["name", "age"],
        }
    },
    "wide schema": {"json": {"type": "object", "properties": OPTIONAL}},
    "long text": {"json": {"type": "string", "maxLength": 5000}},
    "natural ambiguity": {"grammar": 'root ::= e\ne ::= e "+" e | e "*" e | [0-9]'},
    "recursive schema": {
        "json": {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "string"},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                }
            },
        }
    },
}


@pytest.mark.parametrize("constraint", HARMLESS.values(), ids=HARMLESS)
def test_cheap_constraint_passes(
    run: LoopThread, vllm_engine: Engine, constraint: dict[str, Any]
) -> None:
    """What people use passes the guard and binds the answer."""
    (chunk,) = run(collect(vllm_engine, job(constraint)))
    assert chunk.tokens


# Only Outlines takes the first: vLLM's engine would have it for all, also for what it lacks.
OTHER_LIBRARIES: dict[str, tuple[dict[str, Any], str]] = {
    "outlines": (
        {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "number", "multipleOf": 2}},
                "patternProperties": {"^x": {"type": "integer"}},
            }
        },
        r"\{.*",
    ),
    "guidance": (
        {"json": {"type": "integer", "multipleOf": 1000, "minimum": 1, "maximum": 9999}},
        r"[1-9]000",
    ),
    "xgrammar": ({"json_object": True}, r"\{.*"),
    "a grammar": ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
}
# Only Outlines takes it, and compiles it for 10 s on the fastest machine seen; vLLM allows 5.
UNCOMPILED = {
    "type": "object",
    "properties": {
        "a": {"type": "number", "multipleOf": 2},
        "b": {"type": "string", "pattern": "[a-z]*a[a-z]{18}"},
    },
    "patternProperties": {"^x": {"type": "integer"}},
}


def test_each_constraint_is_compiled_by_its_own_library(
    run: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever came first; and LMI_GRAMMAR_TIMEOUT=0 leaves constraints to vLLM alone."""
    monkeypatch.setenv("VLLM_REGEX_COMPILATION_TIMEOUT_S", "2")
    engine = start_demo_engine(run, grammar_timeout=0)
    for constraint, text in OTHER_LIBRARIES.values():
        (chunk,) = run(collect(engine, job(constraint)))
        assert re.fullmatch(text, chunk.text, re.DOTALL)
    (bound,) = run(collect(engine, job({"regex": "[0-9]{3}"})))
    (plain,) = run(collect(engine, GenerationJob("plain", PROMPT, {"max_tokens": 3})))
    assert bound.text.isdigit()
    assert plain.tokens
    with pytest.raises(PayloadError, match="does not compile: "):
        run(collect(engine, job({"json": UNCOMPILED})))  # vLLM's check lets it pass
    run(engine.close())


def test_constraint_of_any_library_is_tried(run: LoopThread, vllm_engine: Engine) -> None:
    """What only another library takes is compiled by that one, in the child and in the engine."""
    for constraint, text in OTHER_LIBRARIES.values():
        (chunk,) = run(collect(vllm_engine, job(constraint)))
        assert re.fullmatch(text, chunk.text, re.DOTALL)
    with pytest.raises(PayloadError, match="refused"):
        run(collect(vllm_engine, job({"json": UNCOMPILED})))


def test_constraint_that_takes_long_to_check_is_refused(
    run: LoopThread, vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop makes that check again, each time it comes.

    The bound is smaller here: its 0.3 s of the processor can be 5 s of the clock on a busy machine,
    and then the bound of the compilation is met first.
    """
    monkeypatch.setattr(guard, "CHECK_SECONDS", 0.03)
    many = {"type": "object", "properties": {f"p{index}": {} for index in range(300)}}  # 0.16 s
    with pytest.raises(PayloadError, match="the check of it takes"):
        run(collect(vllm_engine, job({"json": {**many, "minProperties": 1, "maxProperties": 299}})))


def test_slow_grammars_of_disconnected_clients_delay_no_request(
    run: LoopThread, vllm_engine: Engine
) -> None:
    """Their trials end with them: sixteen would take 27 s, and one may take 5 s."""

    async def scenario() -> float:
        before = set(psutil.Process().children())
        slow = [{"json": {**WIDE, "minProperties": 100 + number}} for number in range(16)]
        hostile = [asyncio.create_task(collect(vllm_engine, job(one, 500))) for one in slow]
        await asyncio.sleep(0.5)
        for task in hostile:
            task.cancel()
        began = time.monotonic()
        await collect(vllm_engine, job({"regex": "[0-9]{4}-honest"}))
        seconds = time.monotonic() - began
        await asyncio.gather(*hostile, return_exceptions=True)
        await ended(before)
        return seconds

    assert run(scenario()) < 5 * slowdown()


def test_repeated_slow_grammars_delay_no_other_source(run: LoopThread, vllm_engine: Engine) -> None:
    """Sixteen that wait, of one address: another's is tried at once."""

    async def asked(remote: str, constraint: dict[str, Any]) -> None:
        enter_record(RequestRecord("id", "POST", "/", "/", remote, "lmi"))
        with contextlib.suppress(PayloadError):
            await collect(vllm_engine, job(constraint, 500))

    async def scenario() -> float:
        slow = [{"json": {**WIDE, "minProperties": 120 + number}} for number in range(16)]
        hostile = [asyncio.create_task(asked("192.0.2.1", one)) for one in slow]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await asyncio.create_task(asked("198.51.100.7", {"regex": "[0-9]{4}-patient"}))
        seconds = time.monotonic() - began
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        return seconds

    assert run(scenario()) < 10


def test_the_engine_compiles_one_client_after_the_other() -> None:
    """Of one client four wait, of others one each: these come after its first. So for lists."""
    begun: list[str] = []
    ended: set[str] = {"a3"}
    is_busy, may_go = Event(), Event()

    def compiled(request: Any) -> str:
        begun.append(request.name)
        is_busy.set()
        assert may_go.wait(30)
        if request.name == "a4":
            raise ValueError(request.name)
        return str(request.name)

    def asked(name: str, source: object) -> Any:
        fields = None if source is None else {GRAMMAR_SOURCE: source}
        return executor.submit(
            compiled,
            SimpleNamespace(
                name=name,
                is_finished=lambda: name in ended,
                sampling_params=SimpleNamespace(extra_args=fields),
            ),
        )

    executor = FairExecutor(ThreadPoolExecutor(1))
    asked("first", "a")
    assert is_busy.wait(30)
    futures = [asked(name, "a") for name in ("a1", "a2", "a3", "a4")]
    futures += [asked("b1", ["b"]), asked("c1", None)]
    may_go.set()
    executor.shutdown(wait=True)
    assert begun == ["first", "a1", "b1", "c1", "a2", "a4"]
    assert futures[2].cancelled()
    assert isinstance(futures[3].exception(), ValueError)
    assert futures[4].result() == "b1"


def test_grammar_that_becomes_slow_in_the_engine_ends_with_its_request(
    run: LoopThread, vllm_engine: Engine
) -> None:
    """What is slow hides behind a word that a trial never writes, and `logit_bias` does."""
    identify: Any = vllm_engine.tokenizer
    bias = {identify.convert_tokens_to_ids(letter): 100.0 for letter in "q7a"}
    regex = "q7q((a{1,100}){1,100}){1,100}|[b-p]{1,900}"
    sampling = {"max_tokens": 900, "temperature": 0.0, "logit_bias": bias}
    hostile = GenerationJob("hidden", PROMPT, {**sampling, "structured_outputs": {"regex": regex}})
    plain = GenerationJob("plain", PROMPT, {"max_tokens": 20, "temperature": 0.0})

    async def scenario() -> None:
        before = (await collect(vllm_engine, plain))[-1].text
        with pytest.raises(PayloadError, match="too ambiguous"):
            await collect(vllm_engine, hostile)
        assert (await collect(vllm_engine, plain))[-1].text == before

    run(scenario())


DEAD_END = {"grammar": 'root ::= "x" ("a" dead | "b" "c")\ndead ::= "z" never\nnever ::= never "q"'}


def dead_end(engine: Engine, **more: Any) -> dict[str, Any]:
    """Return parameters with which the model takes the branch that has no end."""
    identify: Any = engine.tokenizer
    bias = {str(identify.convert_tokens_to_ids(letter)): -100.0 for letter in ("b", "xb", "bc")}
    bias.pop(str(identify.unk_token_id), None)
    return {"max_tokens": 20, "logit_bias": bias, "structured_outputs": DEAD_END, **more}


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_dead_end_of_an_answer_is_the_client_s_fault(
    run: LoopThread, vllm_engine: Engine, temperature: float, is_streaming: bool
) -> None:
    """A trial found texts; the answer came to where none goes on, after other tokens."""
    sampling = dead_end(vllm_engine, temperature=temperature)
    sampling["logit_bias"] = {int(key): value for key, value in sampling["logit_bias"].items()}
    hostile = GenerationJob("dead", PROMPT, sampling, is_streaming=is_streaming)
    seen = []

    async def scenario() -> None:
        async for chunk in vllm_engine.generate(hostile):
            seen.append(chunk.text)

    with pytest.raises(PayloadError, match="dead end: after the text so far neither"):
        run(scenario())
    assert "".join(seen) == ("xaz" if is_streaming else "")


EXCLUDING: dict[str, dict[str, Any]] = {  # beside the regular expression "ab"
    "allowed_token_ids": {"allowed_token_ids": [5, 6]},
    "bad_words": {"bad_words": ["ab", "a"]},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("field", EXCLUDING)
def test_fields_that_exclude_what_a_grammar_allows_are_named(
    run: LoopThread, vllm_engine: Engine, field: str, temperature: float
) -> None:
    """Plain vLLM samples what neither allows: 500, "Internal server error"."""
    bound = {"structured_outputs": {"regex": "ab"}, "temperature": temperature, "max_tokens": 9}
    excluding = GenerationJob("excluding", PROMPT, {**bound, **EXCLUDING[field]})
    with pytest.raises(PayloadError, match=rf"leaves no token: .* excluded by {field}"):
        run(collect(vllm_engine, excluding))


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_dead_end_of_an_openai_answer_is_400(
    run: LoopThread, vllm_engine: Engine, kind: str
) -> None:
    """Plain vLLM says 500, "Internal server error"."""
    asked = {"prompt": PROMPT, "messages": [{"role": "user", "content": "Hello"}]}
    body = dead_end(vllm_engine, **asked)
    reply = run(vllm_engine.answer_openai(OpenAICall(kind, body, {}, "dead")))
    assert (reply.status, b"has a dead end" in reply.body) == (400, True)


@pytest.mark.parametrize("place", ["chat_template", "chat_template_kwargs"])
def test_template_of_a_request_is_refused(run: LoopThread, vllm_engine: Engine, place: str) -> None:
    """A loop in it would hold a thread of the server, or the memory of the machine."""
    template = "{% for i in range(1000000000) %}a{% endfor %}"
    given: object = template if place == "chat_template" else {"chat_template": template}
    body = {"messages": [{"role": "user", "content": "Hello"}], place: given}
    reply = run(vllm_engine.answer_openai(OpenAICall("chat/completions", body, {}, "template")))
    assert (reply.status, b"trust-request-chat-template" in reply.body) == (400, True)
